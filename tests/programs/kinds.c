/* Mappings that are not managed: they keep their bytes, in memory, while everything
 * else leaves. */
#include "../lib/t.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES (4 * MIB)
#define FEW 16
#define SMALL (64 * 1024)

static char *map_file(int file, int flags)
{
    return T_SYS(mmap(NULL, BYTES, PROT_READ | PROT_WRITE, flags, file, 0));
}

static int memory_file(void)
{
    int file = T_SYS(memfd_create("kinds", MFD_CLOEXEC));
    T_SYS(ftruncate(file, BYTES));
    return file;
}

int main(void)
{
    t_start();
    int file = memory_file();
    struct {
        const char *name;
        char *start;
    } kinds[] = {
        {"shared", map_file(-1, MAP_SHARED | MAP_ANONYMOUS)},
        {"shared file", map_file(memory_file(), MAP_SHARED)},
        {"private file", map_file(file, MAP_PRIVATE)},
        {"/dev/zero", map_file(T_SYS(open("/dev/zero", O_RDWR)), MAP_PRIVATE)},
        {"executable", T_SYS(mmap(NULL, BYTES, PROT_READ | PROT_WRITE | PROT_EXEC,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))},
    };
    char *small[FEW];
    for (size_t k = 0; k < COUNT(kinds); k++)
        t_fill(kinds[k].start, BYTES, k);
    for (size_t i = 0; i < FEW; i++) {
        /* No neighbours: they would become one mapping. */
        char *start = T_SYS(mmap(NULL, SMALL + 2 * PAGE, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        small[i] = start + PAGE;
        T_SYS(mprotect(small[i], SMALL, PROT_READ | PROT_WRITE));
        t_fill(small[i], SMALL, 100 + i);
    }
    char *rest = t_map(64 * MIB);
    t_fill(rest, 64 * MIB, 50);
    t_wait_absent(rest, 64 * MIB, 40);
    /* The file loses its content; the private copies of it do not. */
    for (size_t i = 0; i < BYTES; i += PAGE)
        T_SYS(pwrite(file, "gone", 4, (off_t)i));
    for (size_t k = 0; k < COUNT(kinds); k++) {
        size_t absent = t_absent(kinds[k].start, BYTES);
        T_ASSERT(t_native() || absent == 0, "%zu pages of %s have left", absent, kinds[k].name);
        t_check(kinds[k].start, BYTES, k);
    }
    for (size_t i = 0; i < FEW; i++) {
        T_ASSERT(t_native() || t_absent(small[i], SMALL) == 0, "small mapping %zu has left", i);
        t_check(small[i], SMALL, 100 + i);
    }
    t_check(rest, 64 * MIB, 50);
    t_done();
}
