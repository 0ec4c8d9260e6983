/* The child that every supervisor of the benchmark keeps: a tiny HTTP server that tells when it lives.
 *
 * It sends one datagram "WHO WHAT PID NANOSECONDS" (CLOCK_MONOTONIC) to the unix socket $BENCH_SOCKET at main() (main),
 * once it listens (listen), when it cannot bind (bind) and on TERM or INT (term). GET anything answers 200 in the shape
 * of a Gateway's /health. It writes nothing to stdout or stderr.
 *
 * $BENCH_WHO names it; $TDAI_GATEWAY_PORT or $PORT is its port. BENCH_IGNORE_TERM=1: that is told, not obeyed.
 * BENCH_LIFE_MS=N: exit code 3 after N ms. SIGUSR1: never answer again, keep the port.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char ANSWER[] =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 76\r\nConnection: close\r\n\r\n"
    "{\"status\":\"ok\",\"version\":\"0.1.0\",\"uptime\":1,\"stores\":{\"vectorStore\":true}}\r\n";

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void tell(const char *what, long long when) {
    const char *path = getenv("BENCH_SOCKET"), *who = getenv("BENCH_WHO");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char text[256];
    int s, n;
    if (!path || strlen(path) >= sizeof to.sun_path || (s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) < 0) return;
    strcpy(to.sun_path, path);
    n = snprintf(text, sizeof text, "%s %s %d %lld", who ? who : "?", what, (int)getpid(), when);
    sendto(s, text, n, 0, (struct sockaddr *)&to, sizeof to); /* nobody listens any more: nobody cares */
    close(s);
}

static void serve(int server) {
    struct timeval patience = {1, 0};
    char request[4096];
    int c = accept(server, 0, 0);
    if (c < 0) return;
    setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (read(c, request, sizeof request) > 0) send(c, ANSWER, sizeof ANSWER - 1, MSG_NOSIGNAL);
    close(c);
}

int main(void) {
    long long born = now();
    const char *port = getenv("TDAI_GATEWAY_PORT"), *life = getenv("BENCH_LIFE_MS");
    struct sockaddr_in at = {.sin_family = AF_INET};
    struct signalfd_siginfo got;
    sigset_t wanted;
    int server, on = 1, signals, silent = 0;

    /* Blocked first: a TERM that comes early waits for the loop instead of ending us untold. */
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGINT);
    sigaddset(&wanted, SIGUSR1);
    sigaddset(&wanted, SIGALRM);
    sigprocmask(SIG_BLOCK, &wanted, 0);
    tell("main", born);

    if (!port) port = getenv("PORT");
    at.sin_port = htons(atoi(port ? port : "0"));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(server, (struct sockaddr *)&at, sizeof at) || listen(server, 128)) {
        tell("bind", now());
        return 1;
    }
    tell("listen", now());
    signals = signalfd(-1, &wanted, SFD_CLOEXEC);
    if (life) {
        struct itimerval t = {.it_value = {atoi(life) / 1000, atoi(life) % 1000 * 1000}};
        setitimer(ITIMER_REAL, &t, 0);
    }
    for (;;) {
        struct pollfd ready[2] = {{signals, POLLIN, 0}, {server, POLLIN, 0}};
        if (poll(ready, silent ? 1 : 2, -1) < 0) continue;
        if (ready[0].revents && read(signals, &got, sizeof got) == sizeof got) {
            if (got.ssi_signo == SIGUSR1) silent = 1;
            if (got.ssi_signo == SIGALRM) return 3;
            if (got.ssi_signo == SIGTERM || got.ssi_signo == SIGINT) {
                tell("term", now());
                if (!getenv("BENCH_IGNORE_TERM")) return 0;
            }
        }
        if (!silent && ready[1].revents) serve(server);
    }
}
