"""What a program can say of its memory to Strata, and ask: include/strata.h.

    import strata

    table = strata.empty((1000, 1000), "f8", tier=strata.COMPRESSED)   # NumPy
    strata.advise(table, strata.COLD)
    strata.where(table)           # a tier for each page

Nothing is compiled or linked: the functions are those of the library that
`strata run` has put into the process. Without it nothing is done, and every call
says so: `advise` and `where` raise NotManaged, `allocate` and `empty` too, unless
they are told to do without (`or_plain=True`).

Memory is anything with a writable buffer: bytearray, array, mmap, NumPy arrays that
are contiguous, and what this module allocates. Content never changes, whatever is
said.

    cache = strata.Cache("pages", "report-1")   # strata pool create pages
    cache.put("7", b"...")
    cache.get("7")                              # the same, or None: it may vanish"""

import ctypes
import errno
import mmap
import weakref

from .pool import PAGE, Cache, Pool

__all__ = [
    "COLD", "COMPRESSED", "Cache", "DRAM", "FILE", "FREE_SOON", "HOT", "LOST", "Memory", "NODE",
    "NORMAL", "NOT_MANAGED", "NotManaged", "PAGE", "PIN", "Pool", "SEQUENTIAL", "STAGED",
    "StrataError", "TIER_NAMES", "UNPIN", "UNTOUCHED", "advise", "allocate", "available", "empty", "where",
]

# enum strata_tier
NOT_MANAGED, DRAM, NODE, COMPRESSED, FILE, STAGED, UNTOUCHED, LOST = range(8)
TIER_NAMES = ("not managed", "dram", "node", "compressed", "file", "staged", "untouched", "lost")
# enum strata_advice
NORMAL, HOT, COLD, SEQUENTIAL, PIN, UNPIN, FREE_SOON = range(7)



class StrataError(OSError):
    """Something was not done; `errno` is the code of include/strata.h."""


class NotManaged(StrataError):
    """There is no Strata in this process, or nobody who manages it: the program
    runs as it would anyway."""


def _functions():
    process = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        for name, arguments in (("strata_advise", [pointer, size, number]),
                                ("strata_where", [pointer, size, pointer]),
                                ("strata_alloc", [ctypes.POINTER(pointer), size, number]),
                                ("strata_free", [pointer, size])):
            function = getattr(process, name)
            function.argtypes, function.restype = arguments, number
        process.strata_error.argtypes, process.strata_error.restype = [], ctypes.c_char_p
    except AttributeError:
        return None
    return process


_library = _functions()


def available():
    """Whether somebody manages this process's memory now."""
    if _library is None:
        return False
    byte = ctypes.create_string_buffer(1)
    # To say nothing of one byte changes nothing.
    return _library.strata_advise(ctypes.addressof(byte), 1, UNPIN) == 0


def _need():
    if _library is None:
        raise NotManaged(errno.ENOSYS, "this process is not managed by Strata")
    return _library


def _check(code):
    if code < 0:
        kind = NotManaged if -code == errno.ENOSYS else StrataError
        raise kind(-code, _library.strata_error().decode(errors="replace"))


def _range(memory):
    """Address and length of a buffer; it is kept while the result is."""
    view = memoryview(memory)
    if not view.c_contiguous and not view.f_contiguous:
        raise ValueError("memory that is not contiguous: give its parts one by one")
    if view.readonly:
        raise ValueError("memory that is read-only is not this program's to place")
    if view.nbytes == 0:
        return 0, 0, view
    if not view.c_contiguous:
        # The same bytes, for ctypes: transposed they are in order.
        import numpy
        array = numpy.asarray(memory)
        return array.ctypes.data, array.nbytes, view
    flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    return ctypes.addressof(ctypes.c_char.from_buffer(flat)), view.nbytes, flat


def advise(memory, advice):
    """Says something of the pages that `memory` touches (COLD and FREE_SOON: that are
    wholly in it). Raises StrataError when it was not done."""
    library = _need()
    start, length, _kept = _range(memory)
    _check(library.strata_advise(start, length, advice))


def where(memory):
    """A tier (NOT_MANAGED, DRAM, ...) for each page that `memory` touches, as bytes."""
    library = _need()
    start, length, _kept = _range(memory)
    if length == 0:
        return b""
    pages = (start % PAGE + length + PAGE - 1) // PAGE
    tiers = ctypes.create_string_buffer(pages)
    _check(library.strata_where(start, length, ctypes.addressof(tiers)))
    return tiers.raw


class Memory:
    """Zeroed memory of its own; `view` is all of it. It goes when nobody refers to
    the view any more (a NumPy array over it does)."""

    def __init__(self, view, tier):
        self.view = view
        self.tier = tier
        """The tier that was asked for, or None where there is none."""

    def __len__(self):
        return len(self.view)


def allocate(length, tier, or_plain=False):
    """Memory whose pages are to be in `tier`: DRAM (pinned), NODE, COMPRESSED or FILE. With
    `or_plain`, any memory where that cannot be."""
    if length <= 0:
        raise ValueError("memory has at least one byte")
    try:
        library = _need()
        address = ctypes.c_void_p()
        _check(library.strata_alloc(ctypes.byref(address), length, tier))
    except StrataError:
        if not or_plain:
            raise
        return Memory(memoryview(mmap.mmap(-1, length, mmap.MAP_PRIVATE)), None)
    array = (ctypes.c_char * length).from_address(address.value)
    # Every view of it refers to the array.
    weakref.finalize(array, library.strata_free, address.value, length).atexit = False
    return Memory(memoryview(array).cast("B"), tier)


def empty(shape, dtype=float, tier=DRAM, order="C", or_plain=False):
    """A NumPy array (of zeroes) in a tier."""
    import numpy
    dtype = numpy.dtype(dtype)
    count = int(numpy.prod(shape, dtype=object)) if numpy.ndim(shape) else int(shape)
    if dtype.hasobject:
        raise ValueError("an array of Python objects does not hold their memory")
    if count < 0:
        raise ValueError("negative dimensions are none")
    memory = allocate(max(count * dtype.itemsize, 1), tier, or_plain)
    return numpy.frombuffer(memory.view, dtype, count).reshape(shape, order=order)
