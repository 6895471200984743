"""For Ascend NPUs: lowered to AscendC."""
