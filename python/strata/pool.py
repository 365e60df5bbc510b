"""Pages, and values by name, in a pool of the daemon's: a cache that may vanish."""

import ctypes
import errno
import hashlib
import struct
import threading

PAGE = 4096
# So many pages has the longest value of a cache.
_VALUE_PAGES = 1 << 16
_MAGIC = b"STRCACH1"
# Magic, the name's digest, length and digest of the value, which begins behind it.
_HEAD = struct.Struct("<8s32sQ32s")


class Pool:
    """A file of one of the user's pools: pages by number, each of which may vanish.
    Threads may share it; a forked child opens its own."""

    def __init__(self, pool, file):
        from . import _check, _need
        self._library, self._check = _need(), _check
        functions = (("strata_pool_open", [ctypes.c_char_p] * 2),
                     ("strata_pool_get", [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p,
                                          ctypes.c_size_t, ctypes.c_void_p]),
                     ("strata_pool_put", [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p,
                                          ctypes.c_size_t]),
                     ("strata_pool_flush", [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong]),
                     ("strata_pool_close", [ctypes.c_int]))
        for name, arguments in functions:
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._number = self._library.strata_pool_open(pool.encode(), file.encode())
        self._check(self._number)

    def get(self, first, count=1):
        """A list of `count` pages from number `first` on: bytes, or None where there is none."""
        pages = ctypes.create_string_buffer(count * PAGE)
        found = ctypes.create_string_buffer(count)
        self._check(self._library.strata_pool_get(self._number, first, pages, count, found))
        memory = memoryview(pages)
        return [bytes(memory[at * PAGE:(at + 1) * PAGE]) if found.raw[at] else None
                for at in range(count)]

    def put(self, first, pages):
        """Puts whole pages there; how many the pool took."""
        pages = bytes(pages)
        if len(pages) % PAGE:
            raise ValueError(f"a pool has whole pages of {PAGE} bytes")
        taken = self._library.strata_pool_put(self._number, first, pages, len(pages) // PAGE)
        self._check(taken)
        return taken

    def flush(self, first=0, count=2**64 - 1):
        """Has pages be there no more; without arguments all of the file."""
        count = min(count, 2**64 - 1 - first)
        self._check(self._library.strata_pool_flush(self._number, first, count))

    def close(self):
        if self._number >= 0:
            self._library.strata_pool_close(self._number)
            self._number = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Cache:
    """Values by name, in a file of a pool: each is what was put there, or is not there. What
    keeps it from being asked (no daemon, no pool, no connection) is a miss, and is tried again
    with the next call; `error` says what it was. Processes of one user share it.

    A name is str or bytes, a value bytes. A value is found again as long as all of its pages
    are there; it carries a digest, so that of two that were put at the same time none is found
    by halves."""

    def __init__(self, pool, name):
        self._where = pool, name
        self._pool = None
        self._lock = threading.Lock()
        self.error = None

    @staticmethod
    def _place(name):
        digest = hashlib.sha256(name.encode() if isinstance(name, str) else name).digest()
        # Two names of one place have another digest each: the later one's value is there.
        return int.from_bytes(digest[:6], "little") * _VALUE_PAGES, digest

    def _ask(self, what):
        from . import StrataError
        with self._lock:
            for is_last in (False, True):
                try:
                    if self._pool is None:
                        self._pool = Pool(*self._where)
                    result = what(self._pool)
                    self.error = None
                    return result
                except StrataError as error:
                    self.error = error
                    if self._pool is not None:
                        self._pool.close()
                        self._pool = None
                    # The worker was replaced, or this is a forked child or came from a snapshot.
                    if is_last or error.errno not in (errno.ECONNRESET, errno.EBADF):
                        return None

    def get(self, name):
        """The value, or None."""
        place, digest = self._place(name)

        def look(pool):
            head = pool.get(place)[0]
            if head is None:
                return None
            magic, whose, length, of_value = _HEAD.unpack_from(head)
            if magic != _MAGIC or whose != digest:
                return None
            pages = [head[_HEAD.size:]]
            more = -(-max(length - len(pages[0]), 0) // PAGE)
            if more >= _VALUE_PAGES:
                return None
            pages += pool.get(place + 1, more) if more else []
            if None in pages:
                return None
            value = b"".join(pages)[:length]
            return value if hashlib.sha256(value).digest() == of_value else None
        return self._ask(look)

    def put(self, name, value):
        """Whether the value is there now. One that is too long (256 MiB) never is. If nobody
        could be asked (`error`), what was put before may be there yet."""
        place, digest = self._place(name)
        head = _HEAD.pack(_MAGIC, digest, len(value), hashlib.sha256(value).digest())
        pages = head + bytes(value)
        pages += bytes(-len(pages) % PAGE)
        count = len(pages) // PAGE
        if count > _VALUE_PAGES:
            self.flush(name)
            return False
        return self._ask(lambda pool: pool.put(place, pages) == count) or False

    def flush(self, name=None):
        """Has the value of that name, or all, be there no more. Whether that is so: if not,
        nobody could be asked, and a later call may find it."""
        if name is None:
            return self._ask(lambda pool: pool.flush() or True) or False
        place, _ = self._place(name)
        return self._ask(lambda pool: pool.flush(place, 1) or True) or False
