/* The only process of a guest: fills memory, looks at all of it again and again while it
 * rewrites a part, and says over the serial line whether every byte was right. Linked
 * statically: nothing else is in the guest's initramfs but modules of its kernel.
 *
 *   fill MIB   begin with so much memory    free MIB   give the last of it back
 *   disk       write to its disks as well   end        switch the guest off
 *   forks      how often its kernel has made its random numbers anew for being a clone
 *   agent      start the agent for its balloon    silence    end that
 *   serve      say who it is to whoever connects to its port 7 (guest_network.h)
 *   killed     how often memory was so short that the kernel ended something
 *   rest       do nothing until told something else    go on      that
 *
 * What is on the disks is known in memory, so a disk of another moment than the memory is
 * seen at once.
 */
#define _GNU_SOURCE
#include "guest_network.h"
#include "guest_program.h"

#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

enum { PAGE = 4096, WORDS = PAGE / 8, RANDOM_WORDS = WORDS / 16, PARTS = 16 };
/* Blocks of a disk behind its first, and how many are written in a round. */
enum { BLOCKS = 64, WRITES = 8, DISKS = 2 };
/* How many pages are looked at between two pauses, some milliseconds, and the longest of them:
 * a guest's clock is not what it was where the guest goes on elsewhere. */
enum { PACE_PAGES = 1024, LONGEST_PAUSE_US = 50000 };

static uint64_t *memory;
static size_t pages;
/* Which version of its content each page has. */
static uint32_t *versions;

static uint64_t first_word(uint64_t page, uint32_t version) {
    return (page + 1) * 0x9E3779B97F4A7C15u ^ ((uint64_t)version << 32 | version);
}

static uint64_t next_word(uint64_t x) {
    x ^= x << 13;
    x ^= x >> 7;
    return x ^ x << 17;
}

/* The content of a page: a sixteenth of it hardly compresses. */
static void content(uint64_t page, uint32_t version, uint64_t out[WORDS]) {
    uint64_t x = first_word(page, version);
    for (int i = 0; i < RANDOM_WORDS; i++)
        out[i] = x = next_word(x);
    for (int i = RANDOM_WORDS; i < WORDS; i++)
        out[i] = x;
}

/* Whether a page has it: compared by words, for the instructions of a C library's memcmp are
 * dear to emulate. */
static int has_content(uint64_t page, uint32_t version, const uint64_t at[WORDS]) {
    uint64_t x = first_word(page, version), different = 0;
    for (int i = 0; i < RANDOM_WORDS; i++) {
        x = next_word(x);
        different |= at[i] ^ x;
    }
    for (int i = RANDOM_WORDS; i < WORDS; i++)
        different |= at[i] ^ x;
    return different == 0;
}

static void fill(size_t mib) {
    pages = (mib << 20) / PAGE;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    versions = calloc(pages, sizeof *versions);
    if (memory == MAP_FAILED || !versions) {
        puts("WRONG no memory");
        return;
    }
    for (size_t page = 0; page < pages; page++)
        content(page, 0, memory + page * WORDS);
    puts("filled");
}

static int disks[DISKS], disk_count;
static uint64_t writes;
static uint64_t block[WORDS] __attribute__((aligned(PAGE)));

static int open_disks(void) {
    mkdir("/dev", 0755);
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    for (int i = 0; i < DISKS; i++) {
        char path[] = "/dev/vda";
        path[7] += i;
        int disk = open(path, O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC);
        if (disk < 0)
            break;
        content(0, 0, block);
        block[0] = 0;
        if (pwrite(disk, block, PAGE, 0) != PAGE)
            return 0;
        disks[disk_count++] = disk;
    }
    return disk_count;
}

/* Each write has its number, which the first block of the disk names; the block itself was
 * written so many writes ago, which is known. */
static int disk_round(void) {
    for (int i = 0; i < WRITES; i++, writes++)
        for (int disk = 0; disk < disk_count; disk++) {
            if (pread(disks[disk], block, PAGE, 0) != PAGE || block[0] != writes) {
                printf("WRONG disk %d is at write %lu, memory at %lu\n", disk,
                       (unsigned long)block[0], (unsigned long)writes);
                return 0;
            }
            off_t at = (off_t)(1 + writes % BLOCKS) * PAGE;
            if (writes >= BLOCKS) {
                if (pread(disks[disk], block, PAGE, at) != PAGE ||
                    !has_content((uint64_t)disk, (uint32_t)(writes - BLOCKS), block)) {
                    printf("WRONG block of disk %d at write %lu\n", disk, (unsigned long)writes);
                    return 0;
                }
            }
            content((uint64_t)disk, (uint32_t)writes, block);
            int is_written = pwrite(disks[disk], block, PAGE, at) == PAGE;
            block[0] = writes + 1;
            if (!is_written || pwrite(disks[disk], block, PAGE, 0) != PAGE) {
                printf("WRONG disk %d cannot be written\n", disk);
                return 0;
            }
        }
    return 1;
}

static void count_forks(void) {
    static char line[8192];
    int count = 0, messages = open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    for (ssize_t n; (n = read(messages, line, sizeof line - 1)) > 0;) {
        line[n] = 0;
        count += strstr(line, "reseeded due to virtual machine fork") != NULL;
    }
    if (messages >= 0)
        close(messages);
    printf("forks %d\n", count);
}

static int64_t microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* A pause as long as what was done since the last one: others are emulated beside it. Often, so
 * that it is never long before it writes again. */
static void pace(void) {
    static int64_t began;
    int64_t worked = microseconds() - began;
    if (worked > 0 && worked < LONGEST_PAUSE_US)
        usleep((useconds_t)worked);
    began = microseconds();
}

static int round_of(unsigned number) {
    for (size_t page = 0; page < pages; page++) {
        if (page % PACE_PAGES == 0)
            pace();
        uint64_t *at = memory + page * WORDS;
        if (!has_content(page, versions[page], at)) {
            printf("WRONG page %zu in round %u\n", page, number);
            return 0;
        }
        if (page % PARTS == number % PARTS)
            content(page, ++versions[page], at);
    }
    if (!disk_round())
        return 0;
    printf("round %u right\n", number);
    return 1;
}

static void give_back(size_t mib) {
    size_t less = (mib << 20) / PAGE;
    if (less > pages)
        less = pages;
    pages -= less;
    munmap(memory + pages * WORDS, less * PAGE);
    puts("freed");
}

static pid_t agent;

static void mount_all(void) {
    static const char *const KINDS[][2] = {
        {"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}};
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        mkdir(KINDS[i][1], 0755);
        /* Once is enough: what is there already is not mounted again. */
        char there[32];
        snprintf(there, sizeof there, "%s/%s", KINDS[i][1], i == 0 ? "stat" : i == 1 ? "class" : "kmsg");
        if (access(there, F_OK) != 0)
            mount(KINDS[i][0], KINDS[i][1], KINDS[i][0], 0, NULL);
    }
}

static void start_agent(void) {
    mount_all();
    agent = fork();
    if (agent == 0) {
        execl("/strata-guest-agent", "strata-guest-agent", "--interval", "300", (char *)NULL);
        puts("WRONG no agent");
        _exit(1);
    }
    puts("agent");
}

static void start_server(void) {
    mount_all();
    if (fork() == 0)
        serve();
}

static void end_agent(void) {
    if (agent > 0 && (kill(agent, SIGKILL) != 0 || waitpid(agent, NULL, 0) != agent))
        puts("WRONG agent not ended");
    agent = 0;
    puts("silence");
}

static void say_killed(void) {
    mount_all();
    char line[128];
    long killed = -1;
    FILE *file = fopen("/proc/vmstat", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "oom_kill %ld", &killed);
    if (file)
        fclose(file);
    printf("killed %ld\n", killed);
}

int main(void) {
    begin();
    puts("\nup");
    int rests = 0;
    for (unsigned number = 1;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (poll(&input, 1, pages && !rests ? 0 : -1) > 0) {
            char said[64];
            size_t mib = 0;
            if (!fgets(said, sizeof said, stdin))
                break;
            int rested = rests;
            rests = strncmp(said, "rest", 4) == 0;
            if (rests)
                puts("rests");
            else if (sscanf(said, "fill %zu", &mib) == 1)
                fill(mib);
            else if (sscanf(said, "free %zu", &mib) == 1)
                give_back(mib);
            else if (strncmp(said, "disk", 4) == 0)
                puts(open_disks() ? "disks" : "WRONG no disk");
            else if (strncmp(said, "forks", 5) == 0)
                count_forks();
            else if (strncmp(said, "agent", 5) == 0)
                start_agent();
            else if (strncmp(said, "serve", 5) == 0)
                start_server();
            else if (strncmp(said, "silence", 7) == 0)
                end_agent();
            else if (strncmp(said, "killed", 6) == 0)
                say_killed();
            else if (strncmp(said, "end", 3) == 0)
                break;
            else if (strncmp(said, "go on", 5) != 0)
                rests = rested; /* A part of a line, the rest of which was lost. */
        }
        if (pages && !rests && !round_of(number++))
            break;
    }
    if (disk_count)
        printf("writes %lu\n", (unsigned long)writes);
    end();
}
