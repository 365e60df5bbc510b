/* Disks that a guest reads and writes: says whether every byte was right. For the only
 * process of a guest. */
#pragma once

#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { DISK_PAGE = 4096, DISK_WORDS = DISK_PAGE / 8, AT_ONCE = 32, STRIDE = 3, PART = 4, DISKS = 4 };

/* As tests/cases/pool_guests.py writes it: the first half of a page differs from byte to
 * byte, the rest is zero. */
static void disk_content(uint64_t page, uint32_t version, uint64_t out[DISK_WORDS]) {
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15u ^ ((uint64_t)version << 32 | version);
    for (int i = 0; i < DISK_WORDS; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        out[i] = i < DISK_WORDS / 2 ? x : 0;
    }
}

/* Which version of its content a disk has where it was written. */
static uint32_t versions[DISKS];

static int is_written(uint64_t page, uint64_t size) {
    return page % STRIDE == 0 && page < size / DISK_PAGE / PART;
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
    static uint64_t bytes[AT_ONCE * DISK_WORDS], expected[DISK_WORDS];
    unsigned number;
    uint64_t size = 0;
    int disk = open_disk(name, O_RDONLY, &number);
    if (disk < 0)
        return;
    ioctl(disk, BLKFLSBUF, 0);
    ioctl(disk, BLKGETSIZE64, &size);
    for (uint64_t page = 0; page < size / DISK_PAGE; page += AT_ONCE) {
        ssize_t got = pread(disk, bytes, sizeof bytes, (off_t)(page * DISK_PAGE));
        if (got <= 0) {
            printf("WRONG cannot read %s at page %llu\n", name, (unsigned long long)page);
            break;
        }
        for (uint64_t i = 0; i < (uint64_t)got / DISK_PAGE; i++) {
            disk_content(page + i, is_written(page + i, size) ? versions[number] : 0, expected);
            if (memcmp(bytes + i * DISK_WORDS, expected, DISK_PAGE) != 0)
                printf("WRONG page %llu of %s\n", (unsigned long long)(page + i), name);
        }
    }
    close(disk);
    printf("read %s %llu right\n", name, (unsigned long long)(size / DISK_PAGE));
}

static void write_some(const char *name, uint32_t version) {
    uint64_t bytes[DISK_WORDS], size = 0;
    unsigned number;
    int disk = open_disk(name, O_WRONLY, &number);
    if (disk < 0)
        return;
    ioctl(disk, BLKGETSIZE64, &size);
    versions[number] = version;
    for (uint64_t page = 0; is_written(page, size); page += STRIDE) {
        disk_content(page, version, bytes);
        if (pwrite(disk, bytes, DISK_PAGE, (off_t)(page * DISK_PAGE)) != DISK_PAGE)
            printf("WRONG cannot write %s at page %llu\n", name, (unsigned long long)page);
    }
    if (fsync(disk) != 0)
        printf("WRONG cannot flush %s\n", name);
    close(disk);
    printf("wrote %s\n", name);
}

