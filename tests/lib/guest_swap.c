/* The only process of a guest that has more memory than there is, and a swap disk: says over
 * the serial line whether every byte was right. Linked statically, as guest_memory.c.
 *
 *   on                  switch the swap disk on, as Strata has made it
 *   fill MIB VERSION    have so much memory more, every page written
 *   check               read all that was filled last
 *   halve               give the second half of that up
 *   off                 give all of it up, switch the swap disk off, and discard it
 *   read, write         a disk before it, as guest_disk.c
 *   end                 switch the guest off
 */
#define _GNU_SOURCE
#include "guest_disk.h"
#include "guest_program.h"

#include <linux/fs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/sysinfo.h>

enum { PAGE = 4096, WORDS = PAGE / 8, KINDS = 8, DISCARD = 0x10000 };

/* One in eight is zero, three are of sixteen contents, the rest of one each; half of their
 * words differ from each other, the rest is zero. */
static void content(uint64_t page, uint32_t version, uint64_t out[WORDS]) {
    uint64_t kind = page % KINDS, name = kind < 4 ? kind + page / KINDS % 16 * KINDS : page;
    uint64_t x = (name + 1) * 0x9E3779B97F4A7C15u ^ ((uint64_t)version << 32 | version);
    for (int i = 0; i < WORDS; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        out[i] = kind != 0 && i < WORDS / 2 ? x : 0;
    }
}

/* The last disk. */
static const char *swap_name(void) {
    return access("/sys/block/vdb", F_OK) == 0 ? "vdb" : "vda";
}

static const char *in_place(const char *before_name, const char *after_name) {
    static char path[64];
    snprintf(path, sizeof path, "%s%s%s", before_name, swap_name(), after_name);
    return path;
}

static uint64_t *memory, *before;
static uint64_t pages, pages_before;
static uint32_t version;

static unsigned long swapped_pages(void) {
    struct sysinfo info;
    return sysinfo(&info) == 0 ? (info.totalswap - info.freeswap) * info.mem_unit / PAGE : 0;
}

static void switch_on(void) {
    /* The kernel sends no discard for single slots of a disk that it believes to turn. */
    int turns = open(in_place("/sys/block/", "/queue/rotational"), O_WRONLY | O_CLOEXEC);
    if (turns < 0 || write(turns, "0", 1) != 1)
        puts("WRONG cannot say that the disk does not turn");
    close(turns);
    if (swapon(in_place("/dev/", ""), DISCARD) != 0)
        puts("WRONG cannot switch the swap disk on");
    struct sysinfo info;
    sysinfo(&info);
    printf("on %lu\n", info.totalswap * info.mem_unit / PAGE);
}

static void fill(uint64_t mib, uint32_t of) {
    before = memory;
    pages_before = pages;
    pages = mib << 20 >> 12;
    version = of;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        puts("WRONG no memory");
        pages = 0;
        return;
    }
    for (uint64_t page = 0; page < pages; page++)
        content(page, version, memory + page * WORDS);
    printf("filled %llu, %lu out\n", (unsigned long long)pages, swapped_pages());
}

static void check(void) {
    uint64_t expected[WORDS];
    for (uint64_t page = 0; page < pages; page++) {
        content(page, version, expected);
        if (memcmp(memory + page * WORDS, expected, PAGE) != 0)
            printf("WRONG page %llu\n", (unsigned long long)page);
        if (page == pages / 4)
            puts("middle");
    }
    printf("checked %llu, %lu out\n", (unsigned long long)pages, swapped_pages());
}

static void switch_off(void) {
    munmap(memory, pages * PAGE);
    munmap(before, pages_before * PAGE);
    pages = 0;
    if (swapoff(in_place("/dev/", "")) != 0)
        puts("WRONG cannot switch the swap disk off");
    int disk = open(in_place("/dev/", ""), O_WRONLY | O_CLOEXEC);
    uint64_t size = 0;
    ioctl(disk, BLKGETSIZE64, &size);
    uint64_t range[2] = {0, size};
    if (disk < 0 || size == 0 || ioctl(disk, BLKDISCARD, range) != 0)
        puts("WRONG cannot discard the swap disk");
    close(disk);
    puts("off");
}

int main(void) {
    begin();
    mkdir("/dev", 0755);
    mkdir("/sys", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    mount("sysfs", "/sys", "sysfs", 0, "");
    puts("\nup");
    char said[64], name[16];
    unsigned mib, of;
    while (fgets(said, sizeof said, stdin)) {
        if (strncmp(said, "on", 2) == 0)
            switch_on();
        else if (sscanf(said, "fill %u %u", &mib, &of) == 2)
            fill(mib, of);
        else if (strncmp(said, "check", 5) == 0)
            check();
        else if (strncmp(said, "halve", 5) == 0) {
            munmap(memory + pages / 2 * WORDS, pages / 2 * PAGE);
            pages /= 2;
            puts("halved");
        } else if (strncmp(said, "off", 3) == 0)
            switch_off();
        else if (sscanf(said, "read %15s", name) == 1)
            read_all(name);
        else if (sscanf(said, "write %15s %u", name, &of) == 2)
            write_some(name, of);
        else if (strncmp(said, "end", 3) == 0)
            break;
    }
    end();
}
