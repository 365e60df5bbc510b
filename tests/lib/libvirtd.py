"""A libvirt of a case's own: libvirtd and virtlogd with Debian's configuration, in a mount
namespace in which all of libvirt's directories are private. The machine's own libvirt, if
there is one, is not touched: neither its sockets nor its domains are to be seen there."""

import glob
import os
import pwd
import shutil
import signal
import subprocess
import sys

import guest
import machine
from strata import Failure, Skip
from suite import ROOT
from under import WITHOUT, Guest

CONFIGURATION = "/etc/libvirt"
STATE = ("/var/lib/libvirt", "/run/libvirt", "/var/log/libvirt", "/var/cache/libvirt")
USER = "libvirt-qemu"
# Orphans are collected, as the first process of a system does it: libvirt waits until the
# QEMU that it asked what it can do is gone, half a minute each time.
REAPER = os.path.join(ROOT, "tests", "lib", "reaper.py")
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx",
                                      "fd", "stdin", "stdout", "stderr")]

DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{place}/vmlinuz</kernel>
    <initrd>{place}/initramfs</initrd>
    <cmdline>{append}</cmdline>
  </os>
  <features>
    <acpi/>
  </features>
  <cpu mode='maximum'>{lacks}
  </cpu>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>{qemu}</emulator>
    <controller type='usb' model='none'/>
    <serial type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/{name}.serial'/>
    </serial>{devices}
  </devices>
</domain>
"""
LACKS = """
    <feature policy='disable' name='{name}'/>"""


def user():
    """Whose process QEMU is: Debian's user, or root where libvirt's packages made none."""
    try:
        pwd.getpwnam(USER)
        return USER
    except KeyError:
        return "root"


class Libvirt:
    """`place`: a directory that others may enter; `hook`: a script that libvirt asks before
    a domain starts."""

    def __init__(self, run, place, hook=None):
        self.run, self.place = run, place
        programs = [run.tool(name) for name in ("unshare", "nsenter", "virtlogd", "libvirtd")]
        self.virsh_path = run.tool("virsh")
        unshare, self.nsenter, virtlogd, libvirtd = programs
        if not os.path.exists(os.path.join(CONFIGURATION, "qemu.conf")):
            raise Skip("libvirt's configuration is not installed (libvirt-daemon-system)")
        self.processes, self.pid_files, self.keeper = [], [], None
        binds = []
        for number, there in enumerate((CONFIGURATION, *STATE)):
            here = os.path.join(place, f"libvirt-{number}")
            if there == CONFIGURATION:
                # Without networks: a virtual one would be seen outside of the namespace.
                shutil.copytree(there, here, ignore=shutil.ignore_patterns("networks", "autostart"))
                if hook:
                    os.makedirs(os.path.join(here, "hooks"), exist_ok=True)
                    with open(os.path.join(here, "hooks", "qemu"), "w") as file:
                        file.write(hook)
                    os.chmod(file.name, 0o755)
                if user() == "root":
                    with open(os.path.join(here, "qemu.conf"), "a") as file:
                        file.write('\nuser = "root"\ngroup = "root"\n')
            else:
                os.mkdir(here)
            os.chmod(here, 0o755)
            os.makedirs(there, exist_ok=True)
            binds.append(f"mount --bind {here} {there}")
        # A /dev without KVM: what root may open and QEMU's user may not, libvirt takes for
        # changed each time that it looks, and asks QEMU anew what it can. That takes seconds.
        here = os.path.join(place, "dev")
        os.makedirs(here)
        binds += [f"mount -t tmpfs -o mode=755 none {here}",
                  f"cp -a {' '.join(DEVICES)} {here}", f"mkdir {here}/pts {here}/shm",
                  f"mount --bind /dev/pts {here}/pts", f"mount --bind /dev/shm {here}/shm",
                  # Nothing twice: libvirt moves what is mounted there out of its own way.
                  "{ umount -R -l /dev || true; }", f"mount --move {here} /dev"]
        script = " && ".join(["mount --make-rprivate /", *binds, "echo there", "exec cat"])
        self.log = open(os.path.join(run.log_directory, "libvirt.log"), "ab")
        self.keeper = subprocess.Popen([unshare, "-m", "sh", "-c", script], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=self.log, start_new_session=True)
        self.processes.append(self.keeper)
        try:
            if self.keeper.stdout.readline() != "there\n":
                raise Failure(f"no namespace of its own: see {self.log.name}")
            for name, program in (("virtlogd", virtlogd), ("libvirtd", libvirtd)):
                pid_file = os.path.join(place, f"{name}.pid")
                command = self.inside([program, "--pid-file", pid_file])
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-B", REAPER, *command], stdin=subprocess.DEVNULL,
                    stdout=self.log, stderr=self.log, start_new_session=True))
                self.pid_files.append(pid_file)
            run.daemon.wait_until(self.answers, f"libvirtd answers; see {self.log.name}")
        except BaseException:
            self.end()
            raise

    def inside(self, command):
        """The command line for something to run in the namespace, as the same process."""
        return [self.nsenter, f"--mount=/proc/{self.keeper.pid}/ns/mnt", "--", *command]

    def call(self, command, check=True, text=None, environment=None):
        done = subprocess.run(self.inside(command), input=text, capture_output=True, text=True,
                              env=environment, timeout=60 * self.run.patience, check=False)
        if check and done.returncode != 0:
            raise Failure(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()}")
        return done

    def virsh(self, *words, check=True, text=None):
        return self.call([self.virsh_path, "--quiet", *words], check, text).stdout

    def define(self, name, memory_mib, devices=""):
        """A domain that boots from `vmlinuz` and `initramfs` in the case's place, with
        `devices`, in libvirt's words, beside its serial line."""
        text = DOMAIN.format(
            name=name, memory_mib=memory_mib, place=self.place, devices=devices,
            append=guest.APPEND, lacks="".join(LACKS.format(name=name) for name in WITHOUT),
            qemu=self.run.tool("qemu-system-x86_64"))
        self.virsh("define", "--file", "/dev/stdin", text=text)

    def answers(self):
        for process in self.processes:
            if process.poll() is not None:
                raise Failure(f"{process.args[-1]} ended with status {process.returncode}")
        return self.virsh("uri", check=False).strip() == "qemu:///system"

    def strata(self, *arguments, check=True):
        return self.call([self.run.binaries.strata, *arguments], check,
                         environment=self.run.daemon.environment())

    def end(self):
        """Those that it started, by their ids: guests first."""
        for file in glob.glob(os.path.join(self.place, "libvirt-2", "qemu", "*.pid")):
            pid = int(machine.read(file) or 0)
            if "-name" in machine.read(f"/proc/{pid}/cmdline").split("\0"):
                os.kill(pid, signal.SIGKILL)
        for pid_file in reversed(self.pid_files):
            if pid := int(machine.read(pid_file).strip() or 0):
                os.kill(pid, signal.SIGTERM)
        for process in reversed(self.processes):
            if process is self.keeper:
                process.stdin.close()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()


class Emulated:
    """QEMU as libvirt started it, by its process id."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if machine.alive(self.pid):
            return None
        self.returncode = 0
        return 0


class Domain(Guest):
    """A guest that libvirt starts; its tenant is called `tenant`."""

    def __init__(self, run, libvirt, name, tenant, serial):
        # Nothing of how `strata vm run` starts one.
        self.run, self.libvirt, self.domain, self.name = run, libvirt, name, tenant
        self.log_path = libvirt.log.name
        self.said, self.process, self.serial = "", None, serial

    def start(self):
        """Begins when somebody listens: what it says first is not to be lost."""
        self.libvirt.virsh("start", "--paused", self.domain)
        pid_file = f"/proc/{self.libvirt.keeper.pid}/root/run/libvirt/qemu/{self.domain}.pid"
        self.process = Emulated(int(machine.read(pid_file)))
        self.line = self.connect(self.serial)
        self.libvirt.virsh("resume", self.domain)

    def end(self):
        self.tell("end")
        self.hear(r"^end\n")
        self.run.daemon.wait_until(lambda: self.process.poll() is not None, "QEMU ends")
        self.line.close()

    def kill(self):
        if self.process and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.run.daemon.wait_until(lambda: self.process.poll() is not None, "QEMU is killed")
