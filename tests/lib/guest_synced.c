/* The only process of a guest that writes to a file system and flushes each time, until its
 * power is cut: what it says is synced must be there afterwards. Linked statically.
 *
 *   go COUNT   so many records: each over one of SLOTS places of the file "log", and every
 *              fourth also as a file of its own, with its directory
 */
#define _GNU_SOURCE
#include "guest_program.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

enum { PAGE = 4096, WORDS = PAGE / 8, SLOTS = 64, EVERY = 4 };

/* As tests/cases/pool_guests.py has it, of the first version. */
static void content(uint64_t page, uint64_t out[WORDS]) {
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < WORDS; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        out[i] = i < WORDS / 2 ? x : 0;
    }
}

static void failed(const char *what) {
    printf("WRONG %s: %m\n", what);
    end();
}

static void file_of_its_own(unsigned number, int directory, const uint64_t bytes[WORDS]) {
    char name[32];
    snprintf(name, sizeof name, "n%u", number);
    int file = openat(directory, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0 || write(file, bytes, PAGE) != PAGE || fsync(file) != 0 || fsync(directory) != 0)
        failed(name);
    close(file);
}

int main(void) {
    static const char *const MORE[] = {"crc16", "crc32c_generic", "libcrc32c", "mbcache", "jbd2", "ext4"};
    begin();
    load(MORE, sizeof MORE / sizeof *MORE);
    mkdir("/dev", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    mkdir("/m", 0755);
    if (mount("/dev/vda", "/m", "ext4", 0, "") != 0)
        failed("mount");
    int directory = open("/m", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int log = open("/m/log", O_WRONLY | O_CLOEXEC);
    if (directory < 0 || log < 0)
        failed("open");
    puts("\nup");
    char said[64];
    unsigned count = 0, number = 0;
    while (fgets(said, sizeof said, stdin))
        for (sscanf(said, "go %u", &count); count > 0; count--, number++) {
            uint64_t bytes[WORDS];
            content(number, bytes);
            if (pwrite(log, bytes, PAGE, (off_t)(number % SLOTS) * PAGE) != PAGE ||
                fdatasync(log) != 0)
                failed("log");
            if (number % EVERY == 0)
                file_of_its_own(number, directory, bytes);
            printf("synced %u\n", number);
        }
    end();
}
