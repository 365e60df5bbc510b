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

enum { PAGE = 4096, WORDS = PAGE / 8, RANDOM_WORDS = WORDS / 16, PARTS = 16 };
/* Blocks of a disk behind its first, and how many are written in a round. */
enum { BLOCKS = 64, WRITES = 8, DISKS = 2 };

static uint64_t *memory;
static size_t pages;
/* Which version of its content each page has. */
static uint32_t *versions;

/* The content of a page: a sixteenth of it hardly compresses. */
static void content(uint64_t page, uint32_t version, uint64_t out[WORDS]) {
    uint64_t x = (page + 1) * 0x9E3779B97F4A7C15u ^ ((uint64_t)version << 32 | version);
    for (int i = 0; i < WORDS; i++) {
        if (i < RANDOM_WORDS) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        out[i] = x;
    }
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
    uint64_t expected[WORDS];
    for (int i = 0; i < WRITES; i++, writes++)
        for (int disk = 0; disk < disk_count; disk++) {
            if (pread(disks[disk], block, PAGE, 0) != PAGE || block[0] != writes) {
                printf("WRONG disk %d is at write %lu, memory at %lu\n", disk,
                       (unsigned long)block[0], (unsigned long)writes);
                return 0;
            }
            off_t at = (off_t)(1 + writes % BLOCKS) * PAGE;
            if (writes >= BLOCKS) {
                content((uint64_t)disk, (uint32_t)(writes - BLOCKS), expected);
                if (pread(disks[disk], block, PAGE, at) != PAGE ||
                    memcmp(block, expected, PAGE) != 0) {
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

static int round_of(unsigned number) {
    uint64_t expected[WORDS];
    for (size_t page = 0; page < pages; page++) {
        uint64_t *at = memory + page * WORDS;
        content(page, versions[page], expected);
        if (memcmp(at, expected, PAGE) != 0) {
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
