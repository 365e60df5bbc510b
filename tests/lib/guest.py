"""Runs cases of this suite in a small guest under another kernel: QEMU, the
kernel that `scripts/setup.sh guest` fetched, and an initramfs made of this
machine's own python3, C library, and the built programs. No disk, no network;
what the guest says comes over its serial line. QEMU emulates (TCG): it works
everywhere, and slowness changes no verdict."""

import glob
import os
import re
import stat
import subprocess
import sys
import sysconfig

from strata import Failure

MEMORY_MIB = 1024
# What the programs and the cases call by name.
COMMANDS = ("/bin/cat", "/bin/true", "/bin/sh")
# Of python's library: what the suite has no use for.
NOT_NEEDED = ("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "distutils", "site-packages",
              "dist-packages", "__pycache__", "pydoc_data", "turtledemo", "unittest")


def kernels(directory):
    """((major, minor), path) of the kernels there, oldest first."""
    found = []
    for path in glob.glob(os.path.join(directory, "vmlinuz-*")):
        number = re.match(r"vmlinuz-(\d+)\.(\d+)", os.path.basename(path))
        if number:
            found.append(((int(number[1]), int(number[2])), path))
    return sorted(found)


class Archive:
    """An initramfs being written: cpio's "newc" format
    (Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self, path):
        self.file = open(path, "wb")
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
            self.entry(parent, stat.S_IFDIR | 0o755)

    def add(self, source, name=None):
        """A file, with the libraries that it is linked with."""
        name = name or source
        if name in self.known:
            return
        self.parents(name)
        self.known.add(name)
        with open(source, "rb") as file:
            content = file.read()
        mode = 0o755 if os.access(source, os.X_OK) else 0o644
        self.entry(name, stat.S_IFREG | mode, content)
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


def make_initramfs(path, root, binaries, programs):
    """`root`: of the repository; `programs`: the directory of the built ones."""
    python = os.path.realpath(sys.executable)
    archive = Archive(path)
    archive.add(python)
    archive.tree(sysconfig.get_path("stdlib"), without=NOT_NEEDED)
    for command in COMMANDS:
        archive.add(os.path.realpath(command), command)
    for name in ("strata", "stratad", "libstrata.so"):
        archive.add(os.path.join(binaries.directory, name), "/strata/bin/" + name)
    archive.tree(os.path.join(root, "tests"), "/strata/tests", without=("__pycache__",))
    for program in os.listdir(programs):
        if os.path.isfile(os.path.join(programs, program)):
            archive.add(os.path.join(programs, program), "/strata/target/tests/" + program)
    with open(os.path.join(root, "tests", "lib", "guest_init.py"), "rb") as file:
        init = b"#!" + python.encode() + b" -B\n" + file.read()
    archive.entry("/init", stat.S_IFREG | 0o755, init)
    archive.end()


def run(qemu, kernel, initramfs, arguments, log_path, timeout_s):
    """Runs `tests/run.sh ARGUMENTS` in a guest; the verdicts by case's name."""
    command = [
        qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-machine", "q35", "-smp", "2",
        "-m", str(MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs,
        "-append", "console=ttyS0 quiet panic=-1 -- " + " ".join(arguments),
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
            re.findall(r"^(ok|FAIL|skipped) ([\w-]+)(.*)$", said, re.MULTILINE)}
