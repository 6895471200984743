"""The part of the CUDA driver API that launching a kernel takes, through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverError(Exception):
    """A call of the CUDA driver failed; the text names the call and the driver's error."""


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from None


def call(name: str, *arguments: Any) -> None:
    """Call `name` of the driver. Raises DriverError unless it returns success."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {text.value.decode() if text.value else status}")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """Function `name` of a cubin in the current context, allowed `shared_bytes` of dynamic shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared_bytes > 48 * 1024:
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
    return function


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute whose value is one integer."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)]


class _Config(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared bytes
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_STARTS_EARLY = _Attribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def launch(
    function: ctypes.c_void_p,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    stream: int,
    parameters: ctypes.Array[ctypes.c_void_p],
    starts_early: bool = False,
    all_at_once: bool = False,
) -> None:
    """Put one launch on `stream` (a CUstream handle). `parameters` point to the arguments, which are copied now.

    `starts_early`: the kernel waits itself for the one before (griddepcontrol.wait), which may let it start.
    `all_at_once`: blocks wait for each other; an error if the card has no room for all.
    """
    if all_at_once:
        handle = ctypes.c_void_p(stream)
        status = _library().cuLaunchCooperativeKernel(function, *grid, *block, shared_bytes, handle, parameters)
    elif starts_early:
        config = _Config((ctypes.c_uint * 7)(*grid, *block, shared_bytes), stream, ctypes.pointer(_STARTS_EARLY), 1)
        status = _library().cuLaunchKernelEx(ctypes.byref(config), function, parameters, None)
    else:
        handle = ctypes.c_void_p(stream)
        status = _library().cuLaunchKernel(function, *grid, *block, shared_bytes, handle, parameters, None)
    if status:
        call("cuGetErrorName", status, ctypes.byref(text := ctypes.c_char_p()))
        raise DriverError(f"cuLaunchKernel: {text.value.decode() if text.value else status}")
