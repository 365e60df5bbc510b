/* What the only process of a guest begins and ends with (guest_*.c): it
 * speaks over the serial line, and has the kernel's modules that it needs. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

/* In order: each needs those before it. What a guest's initramfs has not is passed over. */
static const char *const MODULES[] = {
    "virtio_ring",           "virtio",     "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev", "virtio_pci", "virtio_mmio",
    "virtio_balloon",        "virtio_blk", "virtio_console",
    "failover",              "net_failover", "virtio_net",
};

static void load(const char *const modules[], size_t count) {
    /* Twice: which of two needs the other depends on the kernel. */
    for (int again = 0; again < 2; again++)
        for (size_t i = 0; i < count; i++) {
            char path[64];
            snprintf(path, sizeof path, "/modules/%s.ko", modules[i]);
            int file = open(path, O_RDONLY | O_CLOEXEC);
            if (file >= 0) {
                syscall(SYS_finit_module, file, "", 0);
                close(file);
            }
        }
}

static void begin(void) {
    struct termios line;
    if (tcgetattr(0, &line) == 0) {
        line.c_lflag &= ~(tcflag_t)(ECHO | ECHONL);
        line.c_oflag &= ~(tcflag_t)OPOST;
        tcsetattr(0, TCSANOW, &line);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    load(MODULES, sizeof MODULES / sizeof *MODULES);
}

static _Noreturn void end(void) {
    puts("end");
    sync();
    reboot(RB_POWER_OFF);
    for (;;)
        pause();
}
