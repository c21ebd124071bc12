"""What Gluon calls differently in versions of Triton, by one name each: 3.7 and 3.8 renamed some of it."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All warps of a program wait for each other, or all of those that go the same way."""
copy_values = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Start to copy what pointers point at to shared memory: where to, pointers, and which of them (`mask`)."""
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Have a box of a matrix brought to shared memory: the matrix, where the box starts, the barrier, and where to."""
