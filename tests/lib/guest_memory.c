/* The only process of a guest: fills memory, looks at all of it again and again while it
 * rewrites a part, and says over the serial line whether every byte was right. Linked
 * statically: nothing else is in the guest's initramfs but modules of its kernel.
 *
 *   fill MIB   begin with so much memory    free MIB   give the last of it back
 *   end        switch the guest off
 */
#define _GNU_SOURCE
#include "guest_program.h"

#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8, RANDOM_WORDS = WORDS / 16, PARTS = 16 };

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

int main(void) {
    begin();
    puts("\nup");
    for (unsigned number = 1;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (poll(&input, 1, pages ? 0 : -1) > 0) {
            char said[64];
            size_t mib = 0;
            if (!fgets(said, sizeof said, stdin))
                break;
            if (sscanf(said, "fill %zu", &mib) == 1)
                fill(mib);
            else if (sscanf(said, "free %zu", &mib) == 1)
                give_back(mib);
            else if (strncmp(said, "end", 3) == 0)
                break;
        }
        if (pages && !round_of(number++))
            break;
    }
    end();
}
