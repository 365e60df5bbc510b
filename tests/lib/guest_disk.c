/* The only process of a guest that reads and writes disks: says over the serial line
 * whether every byte was right. Linked statically, as guest_memory.c.
 *
 *   read NAME           all of the disk, past the guest's own cache
 *   write NAME VERSION  every third page of the first quarter with a new content, and fsync
 *   end                 switch the guest off
 */
#define _GNU_SOURCE
#include "guest_program.h"

#include <linux/fs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>

enum { PAGE = 4096, WORDS = PAGE / 8, AT_ONCE = 32, STRIDE = 3, PART = 4, DISKS = 4 };

/* As tests/cases/pool_guests.py writes it: the first half of a page differs from byte to
 * byte, the rest is zero. */
static void content(uint64_t page, uint32_t version, uint64_t out[WORDS]) {
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15u ^ ((uint64_t)version << 32 | version);
    for (int i = 0; i < WORDS; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        out[i] = i < WORDS / 2 ? x : 0;
    }
}

/* Which version of its content a disk has where it was written. */
static uint32_t versions[DISKS];

static int is_written(uint64_t page, uint64_t size) {
    return page % STRIDE == 0 && page < size / PAGE / PART;
}

static int open_disk(const char *name, int flags, unsigned *number) {
    char path[32];
    *number = (unsigned)(name[2] - 'a') % DISKS;
    snprintf(path, sizeof path, "/dev/%.8s", name);
    int disk = open(path, flags | O_CLOEXEC);
    if (disk < 0)
        printf("WRONG no %s\n", path);
    return disk;
}

static void read_all(const char *name) {
    static uint64_t bytes[AT_ONCE * WORDS], expected[WORDS];
    unsigned number;
    uint64_t size = 0;
    int disk = open_disk(name, O_RDONLY, &number);
    if (disk < 0)
        return;
    ioctl(disk, BLKFLSBUF, 0);
    ioctl(disk, BLKGETSIZE64, &size);
    for (uint64_t page = 0; page < size / PAGE; page += AT_ONCE) {
        ssize_t got = pread(disk, bytes, sizeof bytes, (off_t)(page * PAGE));
        if (got <= 0) {
            printf("WRONG cannot read %s at page %llu\n", name, (unsigned long long)page);
            break;
        }
        for (uint64_t i = 0; i < (uint64_t)got / PAGE; i++) {
            content(page + i, is_written(page + i, size) ? versions[number] : 0, expected);
            if (memcmp(bytes + i * WORDS, expected, PAGE) != 0)
                printf("WRONG page %llu of %s\n", (unsigned long long)(page + i), name);
        }
    }
    close(disk);
    printf("read %s %llu right\n", name, (unsigned long long)(size / PAGE));
}

static void write_some(const char *name, uint32_t version) {
    uint64_t bytes[WORDS], size = 0;
    unsigned number;
    int disk = open_disk(name, O_WRONLY, &number);
    if (disk < 0)
        return;
    ioctl(disk, BLKGETSIZE64, &size);
    versions[number] = version;
    for (uint64_t page = 0; is_written(page, size); page += STRIDE) {
        content(page, version, bytes);
        if (pwrite(disk, bytes, PAGE, (off_t)(page * PAGE)) != PAGE)
            printf("WRONG cannot write %s at page %llu\n", name, (unsigned long long)page);
    }
    if (fsync(disk) != 0)
        printf("WRONG cannot flush %s\n", name);
    close(disk);
    printf("wrote %s\n", name);
}

int main(void) {
    begin();
    mkdir("/dev", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    puts("\nup");
    char said[64], name[16];
    unsigned version;
    while (fgets(said, sizeof said, stdin)) {
        if (sscanf(said, "read %15s", name) == 1)
            read_all(name);
        else if (sscanf(said, "write %15s %u", name, &version) == 2)
            write_some(name, version);
        else if (strncmp(said, "end", 3) == 0)
            break;
    }
    end();
}
