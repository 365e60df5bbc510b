/* A guest's network card, and a server that says who the guest is: its host name, and the
 * card's address as the kernel has it at that moment. */
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* As QEMU's user networking gives addresses: where its forwarded ports lead. */
static const char OWN_ADDRESS[] = "10.0.2.15";
enum { SERVED_PORT = 7 };

static int raise_interface(int any, const char *name, const char *address) {
    struct ifreq request = {0};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    struct sockaddr_in *to = (struct sockaddr_in *)&request.ifr_addr;
    to->sin_family = AF_INET;
    inet_pton(AF_INET, address, &to->sin_addr);
    if (ioctl(any, SIOCSIFADDR, &request) != 0)
        return -1;
    inet_pton(AF_INET, "255.255.255.0", &to->sin_addr);
    if (ioctl(any, SIOCSIFNETMASK, &request) != 0)
        return -1;
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    return ioctl(any, SIOCSIFFLAGS, &request);
}

static void say_who(int any, int client) {
    char name[65] = "", line[128];
    gethostname(name, sizeof name - 1);
    struct ifreq request = {0};
    snprintf(request.ifr_name, sizeof request.ifr_name, "eth0");
    ioctl(any, SIOCGIFHWADDR, &request);
    const unsigned char *a = (const unsigned char *)request.ifr_hwaddr.sa_data;
    int length = snprintf(line, sizeof line, "%s %02x:%02x:%02x:%02x:%02x:%02x\n", name, a[0], a[1],
                          a[2], a[3], a[4], a[5]);
    if (write(client, line, (size_t)length) != length)
        puts("a client has gone");
}

static _Noreturn void serve(void) {
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(SERVED_PORT)};
    if (raise_interface(any, "eth0", OWN_ADDRESS) != 0 ||
        bind(server, (struct sockaddr *)&at, sizeof at) != 0 || listen(server, 8) != 0)
        puts("WRONG no network");
    puts("serves");
    for (;;) {
        int client = accept(server, NULL, NULL);
        if (client < 0)
            _exit(1);
        say_who(any, client);
        close(client);
    }
}
