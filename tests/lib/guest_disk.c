/* The only process of a guest that reads and writes disks: says over the serial line
 * whether every byte was right. Linked statically, as guest_memory.c.
 *
 *   read NAME           all of the disk, past the guest's own cache
 *   write NAME VERSION  every third page of the first quarter with a new content, and fsync
 *   end                 switch the guest off
 */
#define _GNU_SOURCE
#include "guest_disk.h"
#include "guest_program.h"

#include <sys/mount.h>
#include <sys/stat.h>

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
