"""deepspec: train, calibrate and measure draft models (spec: field, section 3.5)."""
