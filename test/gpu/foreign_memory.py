"""Tensors on memory that PyTorch did not allocate, for the cases about kinds of memory."""

import ctypes

import torch
from rank_side import GUARD, POISON, Buffer, library


class _Memory(ctypes.Structure):
    """memory_kinds.cu's Memory."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("handle", ctypes.c_ulonglong),
    ]


class _Array:
    """What torch.as_tensor needs in order to see memory as a CUDA tensor."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


_library = None


def kinds_library():
    global _library
    if _library is None:
        _library = library("memory_kinds")
        _library.kindAllocate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
        _library.kindFree.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        _library.refusedAllocation.argtypes = [ctypes.c_size_t]
    return _library


class ForeignBuffer(Buffer):
    """A Buffer on memory of `kind` (memory_kinds.cu). free() it when its operations are over."""

    def __init__(self, kind, size, offset=GUARD):
        self._kind, self._memory = kind.encode(), _Memory()
        code = kinds_library().kindAllocate(
            self._kind, offset + size + GUARD, ctypes.byref(self._memory)
        )
        if code != 0:
            raise RuntimeError(f"allocating {kind} memory: CUDA error {code}")
        self.size, self.offset = size, offset
        whole = torch.as_tensor(
            _Array(self._memory.address, offset + size + GUARD), device=torch.device("cuda", 0)
        )
        if whole.data_ptr() != self._memory.address:
            raise RuntimeError(f"PyTorch copied {kind} memory instead of looking at it")
        self.whole = whole.fill_(POISON)
        self.bytes = self.whole[offset : offset + size]

    def free(self):
        self.whole = self.bytes = None
        code = kinds_library().kindFree(self._kind, ctypes.byref(self._memory))
        if code != 0:
            raise RuntimeError(f"freeing {self._kind.decode()} memory: CUDA error {code}")
