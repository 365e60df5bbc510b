/* Waiting with a stack pointer that ends in three zeroes, which one thread in 256
 * does by chance: CRIU takes all memory for a stack then, and restores it itself. */
#ifndef ALIGNED_H
#define ALIGNED_H

#include <sys/syscall.h>
#include <time.h>

static void wait_aligned(time_t seconds, long nanoseconds)
{
    struct timespec nap = {seconds, nanoseconds};
#ifdef __x86_64__
    long result = SYS_nanosleep;
    __asm__ volatile("mov %%rsp, %%rbx\n\t"
                     "sub $8192, %%rsp\n\t"
                     "and $-4096, %%rsp\n\t"
                     "syscall\n\t"
                     "mov %%rbx, %%rsp"
                     : "+a"(result)
                     : "D"(&nap), "S"(0)
                     : "rbx", "rcx", "r11", "memory");
#else
    nanosleep(&nap, NULL);
#endif
}

#endif
