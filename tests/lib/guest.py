"""Runs cases of this suite in a small guest under another kernel: QEMU, the
kernel that `scripts/setup.sh guest` fetched, and an initramfs made of this
machine's own python3 (its modules compiled: there that would take long), C library,
and the built programs. No disk, no network; what the guest says comes over its serial
line. QEMU emulates (TCG): it works everywhere, and slowness changes no verdict. Its two
processors take turns in one thread: in two threads, one has been seen to run into code
that the kernel of the other was just changing (an int3 of its jump labels), and to
panic."""

import glob
import importlib.util
import json
import lzma
import os
import py_compile
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile

from strata import Failure

# Where the suite is in a guest.
GUEST_TESTS = "/strata/tests"
MEMORY_MIB, NVDIMM_MIB = 1024, 512
# Node 0 has the processors, node 1 is farther away and has none.
NODES_MIB = (1024, 256)
# What a guest's processor lacks, for QEMU's emulation takes long for it: it does a string
# instruction element by element, and a kernel that is told that they are fast goes by bytes;
# the wide registers' instructions are calls, where the C library has others without them.
SLOW = ("erms", "fsrm", "avx", "avx2")
# Without what a kernel does for machines that somebody attacks, with page tables of four levels,
# without IPv6, and without tests of its ciphers and random numbers: emulated, each costs much, and
# no case is about them.
APPEND = ("console=ttyS0 quiet panic=-1 mitigations=off init_on_alloc=0 no5lvl "
          "cryptomgr.notests=1 initcall_blacklist=jent_mod_init ipv6.disable=1 noreplace-smp")
# What the programs and the cases call by name.
COMMANDS = ("/bin/cat", "/bin/true", "/bin/sh")
# Of python's library: what the suite has no use for.
NOT_NEEDED = ("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "distutils", "site-packages",
              "dist-packages", "__pycache__", "pydoc_data", "turtledemo", "unittest")


def kernels(directory):
    """((major, minor), path) of the kernels there, oldest first: unpacked, where that was
    possible (scripts/setup.sh)."""
    found = []
    for path in glob.glob(os.path.join(directory, "vmlinuz-*")):
        number = re.match(r"vmlinuz-(\d+)\.(\d+)", os.path.basename(path))
        if number:
            unpacked = path.replace("/vmlinuz-", "/vmlinux-")
            boots = unpacked if os.path.exists(unpacked) else path
            found.append(((int(number[1]), int(number[2])), boots))
    return sorted(found)


class Archive:
    """An initramfs being written: cpio's "newc" format
    (Documentation/driver-api/early-userspace/buffer-format.rst). Files and
    directories have the modes that they have here: CRIU compares them."""

    def __init__(self, path, mode="wb"):
        self.file = open(path, mode)
        self.known = set()
        self.inode = 0

    def entry(self, name, mode, content=b""):
        self.inode += 1
        name = name.lstrip("/")
        fields = (self.inode, mode, 0, 0, 1, 1, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (head + name.encode() + b"\0", content):
            self.file.write(part + b"\0" * (-len(part) % 4))

    def parents(self, name):
        parent = os.path.dirname(name)
        if parent not in ("", "/") and parent not in self.known:
            self.parents(parent)
            self.known.add(parent)
            here = "/" + parent.lstrip("/")
            mode = stat.S_IMODE(os.stat(here).st_mode) if os.path.isdir(here) else 0o755
            self.entry(parent, stat.S_IFDIR | mode)

    def add(self, source, name=None):
        """A file, with the libraries that it is linked with."""
        name = name or source
        if name in self.known:
            return
        self.parents(name)
        self.known.add(name)
        with open(source, "rb") as file:
            content = file.read()
        self.entry(name, stat.S_IFREG | stat.S_IMODE(os.stat(source).st_mode), content)
        if content.startswith(b"\x7fELF"):
            linked = subprocess.run(["ldd", source], capture_output=True, text=True, check=False)
            for library in re.findall(r"(/\S+) \(0x", linked.stdout):
                self.add(library)

    def tree(self, source, name=None, without=()):
        for place, directories, files in os.walk(source):
            directories[:] = [d for d in directories
                              if d not in without and not d.startswith("config-")]
            for file in files:
                path = os.path.join(place, file)
                if os.path.isfile(path):
                    self.add(path, os.path.join(name or source, os.path.relpath(path, source)))

    def end(self):
        self.entry("TRAILER!!!", 0)
        self.file.close()


def tell(path, runs, environment):
    """Adds to an initramfs what the suite is told, a list for each time that it is started,
    with that `environment` (NAME=VALUE). Told once more, that holds: a kernel unpacks one
    archive after the other. Not by the kernel's command line: that takes 32 words."""
    told = {"runs": runs, "environment": dict(pair.split("=", 1) for pair in environment)}
    archive = Archive(path, "ab")
    archive.entry("/told.json", stat.S_IFREG | 0o644, json.dumps(told).encode())
    archive.end()


def add_compiled(archive, root):
    """Beside the sources that are there, what python makes of them, of all modules that this
    process has imported: the guest's suite imports the same. It is taken for theirs
    whatever their times are."""
    tests = os.path.join(root, "tests")
    with tempfile.TemporaryDirectory() as place:
        made = os.path.join(place, "made")
        for module in list(sys.modules.values()):
            source = getattr(module, "__file__", None) or ""
            name = source.replace(tests, GUEST_TESTS)
            if name.endswith(".py") and name in archive.known:
                py_compile.compile(
                    source, made, name, doraise=True,
                    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
                archive.add(made, importlib.util.cache_from_source(name))


def add_criu(archive, criu):
    """CRIU at its own place; with what lies beside it, where scripts/criu.sh
    unpacked it with its libraries and its loader."""
    archive.add(criu)
    for beside in ("usr/sbin", "usr/lib"):
        archive.tree(os.path.join(os.path.dirname(criu), beside))


def modules(kernel):
    """What scripts/setup.sh unpacked beside it."""
    place, name = os.path.split(kernel)
    return sorted(glob.glob(os.path.join(place, "modules-" + name.split("-", 1)[1], "*.ko*")))


def add_modules(archive, kernel):
    """For guest_init.py to load."""
    for path in modules(kernel):
        open_it = lzma.open if path.endswith(".xz") else open
        with open_it(path, "rb") as file:
            name = "/modules/" + os.path.basename(path).removesuffix(".xz")
            archive.parents(name)
            archive.entry(name, stat.S_IFREG | 0o644, file.read())


def make_initramfs(path, root, binaries, programs, more=(), criu=None, kernel=None):
    """All but what the suite is told (`tell`). `root`: of the repository; `programs`: the
    directory of the built ones; `more`: files that are to be there as well, under the names
    that they have here; `kernel`: whose modules."""
    python = os.path.realpath(sys.executable)
    archive = Archive(path)
    archive.add(python)
    archive.tree(sysconfig.get_path("stdlib"), without=NOT_NEEDED)
    for command in COMMANDS:
        archive.add(os.path.realpath(command), command)
    for name in ("strata", "stratad", "strata-clone", "libstrata.so"):
        archive.add(os.path.join(binaries.directory, name), "/strata/bin/" + name)
    archive.tree(os.path.join(root, "tests"), GUEST_TESTS, without=("__pycache__",))
    add_compiled(archive, root)
    for program in os.listdir(programs):
        if os.path.isfile(os.path.join(programs, program)):
            archive.add(os.path.join(programs, program), "/strata/target/tests/" + program)
    for path in more:
        archive.add(path)
    if criu:
        add_criu(archive, criu)
    if kernel:
        add_modules(archive, kernel)
    with open(os.path.join(root, "tests", "lib", "guest_init.py"), "rb") as file:
        init = b"#!" + python.encode() + b" -B\n" + file.read()
    archive.entry("/init", stat.S_IFREG | 0o755, init)
    archive.end()


def cpu(without):
    """What QEMU is told for a processor."""
    return ",".join(["max", *(f"-{name}" for name in without)])


def nodes(sizes_mib=NODES_MIB):
    """What QEMU is told for memory in two nodes."""
    near, far = sizes_mib
    return [
        "-m", str(near + far),
        "-object", f"memory-backend-ram,id=m0,size={near}M",
        "-object", f"memory-backend-ram,id=m1,size={far}M",
        "-numa", "node,nodeid=0,cpus=0-1,memdev=m0", "-numa", "node,nodeid=1,memdev=m1",
        "-numa", "dist,src=0,dst=1,val=40",
    ]


def with_nvdimm(path):
    """What QEMU is told for a file to be an NVDIMM's content."""
    return [
        "-machine", "nvdimm=on",
        "-m", f"{MEMORY_MIB}M,slots=2,maxmem={MEMORY_MIB + NVDIMM_MIB}M",
        "-object", f"memory-backend-file,id=nvdimm,share=on,mem-path={path},size={NVDIMM_MIB}M",
        "-device", "nvdimm,memdev=nvdimm",
    ]


def run(qemu, kernel, initramfs, log_path, timeout_s, hardware):
    """Boots a guest with this `hardware`, in QEMU's words, and lets it run what its
    initramfs says; verdict and the rest of the line by case's name."""
    command = [
        qemu, "-accel", "tcg,thread=single", "-cpu", cpu(SLOW), "-machine", "q35", "-smp", "2",
        "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs, *hardware,
        "-append", APPEND,
    ]
    with open(log_path, "wb") as log:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                           timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise Failure(f"the guest did not end; see {log_path}") from None
    with open(log_path, errors="replace") as log:
        said = log.read().replace("\r", "")
    if "\nguest: end\n" not in said:
        raise Failure(f"the guest ended early; see {log_path}")
    return {name: (verdict, rest.strip(": ")) for verdict, name, rest in
            re.findall(r"^(ok|flaky|FAIL|skipped) ([\w-]+)(.*)$", said, re.MULTILINE)}
