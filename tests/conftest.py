"""Two test workers share two cores: one thread each, or OpenMP's waiting threads slow each other down many times."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported, also by the processes that tests start
