/* A closed-loop HTTP/1.1 load generator: one thread, epoll, kept-alive connections.
 *
 *     generator PORT PATH BODIES CONNECTIONS SECONDS
 *
 * Each line of the file BODIES is the body of a request. All connections together send the bodies
 * in turn. A connection sends its next request when an answer has ended. After SECONDS, the program
 * waits for open answers, and then prints one line of JSON. Only streamed answers have a time to
 * first token. An event of a stream begins with "data: {".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 16384, READ_BYTES = 1 << 18, MAX_EVENTS = 256, GRACE_S = 20 };
enum state { HEADER, FIXED, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, LAST_END };

struct samples {
    uint64_t *ns;
    size_t count, room;
};

struct connection {
    int fd, is_open, status;
    enum state state;
    uint64_t sent, first;
    long left;      /* bytes of the body, or of the chunk */
    int matched;    /* bytes of "data: {" that the end of the body has matched */
    size_t header_length;
    char header[HEADER_BYTES];
};

static const char EVENT[] = "data: {";
static char **requests;
static size_t *lengths;
static size_t num_requests, num_sent;
static long num_ok, num_failed, num_events;
static struct samples latencies, firsts;
static uint64_t ends_at;
static int port, poller;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void add(struct samples *to, uint64_t ns) {
    if (to->count == to->room) {
        to->room = to->room ? 2 * to->room : 65536;
        to->ns = realloc(to->ns, to->room * sizeof *to->ns);
        if (!to->ns) die("realloc");
    }
    to->ns[to->count++] = ns;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double quantile_ms(struct samples *of, double q) {
    if (!of->count) return 0.0;
    return (double)of->ns[(size_t)(q * (double)(of->count - 1))] / 1e6;
}

static void dial(struct connection *c) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    int one = 1;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&at, sizeof at)) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event)) die("epoll_ctl");
}

static void ask(struct connection *c) {
    size_t which = num_sent++ % num_requests, done = 0;
    c->is_open = 1;
    c->state = HEADER;
    c->header_length = 0;
    c->matched = 0;
    c->first = 0;
    c->sent = now();
    while (done < lengths[which]) {
        ssize_t n = send(c->fd, requests[which] + done, lengths[which] - done, MSG_NOSIGNAL);
        if (n <= 0) return; /* the next read notices the error */
        done += (size_t)n;
    }
}

static void end(struct connection *c, int is_whole) {
    uint64_t at = now();
    c->is_open = 0;
    if (is_whole && c->status == 200) {
        num_ok++;
        add(&latencies, at - c->sent);
        if (c->first) add(&firsts, c->first - c->sent);
    } else {
        num_failed++;
    }
    if (at < ends_at) ask(c);
}

static void look_for_events(struct connection *c, const char *data, long n) {
    for (long i = 0; i < n; i++) {
        if (data[i] == EVENT[c->matched]) {
            if (!EVENT[++c->matched]) {
                c->matched = 0;
                num_events++;
                if (!c->first) c->first = now();
            }
        } else {
            c->matched = data[i] == EVENT[0];
        }
    }
}

/* Returns how many of the n bytes belong to the header. */
static long read_header(struct connection *c, const char *data, long n) {
    long room = HEADER_BYTES - 1 - (long)c->header_length, taken = n < room ? n : room;
    size_t before = c->header_length;
    char *stop;
    if (!taken) { /* a header that is too long */
        fprintf(stderr, "a header has more than %d bytes\n", HEADER_BYTES);
        exit(2);
    }
    memcpy(c->header + before, data, (size_t)taken);
    c->header_length += (size_t)taken;
    c->header[c->header_length] = 0;
    stop = strstr(c->header + (before > 3 ? before - 3 : 0), "\r\n\r\n");
    if (!stop) return taken;
    *stop = 0;
    c->status = atoi(c->header + 9);
    c->state = CHUNK_SIZE;
    c->left = 0;
    for (char *line = c->header; line; line = strstr(line, "\r\n")) {
        line += line == c->header ? 0 : 2;
        if (!strncasecmp(line, "content-length:", 15)) {
            c->state = FIXED;
            c->left = atol(line + 15);
        }
    }
    return (stop - c->header) + 4 - (long)before;
}

static void feed(struct connection *c, const char *data, long n) {
    while (n > 0 && c->is_open) {
        long used = 1;
        switch (c->state) {
        case HEADER:
            used = read_header(c, data, n);
            if (c->state == FIXED && !c->left) end(c, 1);
            break;
        case FIXED:
        case CHUNK_DATA:
            used = n < c->left ? n : c->left;
            look_for_events(c, data, used);
            c->left -= used;
            if (!c->left && c->state == FIXED) end(c, 1);
            else if (!c->left) c->state = CHUNK_END;
            break;
        case CHUNK_SIZE: /* hexadecimal, up to the line's end */
            if (*data == '\n') c->state = c->left ? CHUNK_DATA : LAST_END;
            else if (*data != '\r')
                c->left = 16 * c->left + (*data <= '9' ? *data - '0' : (*data | 32) - 'a' + 10);
            break;
        case CHUNK_END:
            if (*data == '\n') c->state = CHUNK_SIZE;
            break;
        case LAST_END:
            if (*data == '\n') end(c, 1);
            break;
        }
        data += used;
        n -= used;
    }
}

static void read_requests(const char *path, const char *bodies) {
    FILE *file = fopen(bodies, "r");
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    if (!file) die(bodies);
    while ((n = getline(&line, &room, file)) > 0) {
        char *request = malloc((size_t)n + 512);
        if (line[n - 1] == '\n') n--;
        if (!n) continue;
        requests = realloc(requests, (num_requests + 1) * sizeof *requests);
        lengths = realloc(lengths, (num_requests + 1) * sizeof *lengths);
        if (!request || !requests || !lengths) die("memory");
        int head = snprintf(request, 512,
                            "POST %.200s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: "
                            "application/json\r\nContent-Length: %zd\r\n\r\n", path, port, n);
        memcpy(request + head, line, (size_t)n);
        requests[num_requests] = request;
        lengths[num_requests++] = (size_t)head + (size_t)n;
    }
    fclose(file);
    if (!num_requests) {
        fprintf(stderr, "%s has no bodies\n", bodies);
        exit(2);
    }
}

static int any_open(const struct connection *all, int count) {
    for (int i = 0; i < count; i++)
        if (all[i].is_open) return 1;
    return 0;
}

int main(int argc, char **argv) {
    static char data[READ_BYTES];
    struct epoll_event ready[MAX_EVENTS];
    if (argc != 6) {
        fprintf(stderr, "generator PORT PATH BODIES CONNECTIONS SECONDS\n");
        return 2;
    }
    port = atoi(argv[1]);
    int count = atoi(argv[4]);
    poller = epoll_create1(0);
    read_requests(argv[2], argv[3]);
    struct connection *all = calloc((size_t)count, sizeof *all);
    if (!all) die("calloc");
    for (int i = 0; i < count; i++) dial(&all[i]);
    uint64_t began = now(), last = began;
    ends_at = began + (uint64_t)(atof(argv[5]) * 1e9);
    for (int i = 0; i < count; i++) ask(&all[i]);
    while (any_open(all, count) && now() < ends_at + GRACE_S * 1000000000ull) {
        int n = epoll_wait(poller, ready, MAX_EVENTS, 100);
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            ssize_t got = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
            if (got > 0) {
                feed(c, data, got);
                last = now();
            } else if (!(got < 0 && errno == EAGAIN)) { /* closed: an open answer has failed */
                int was_open = c->is_open;
                close(c->fd);
                dial(c);
                if (was_open) end(c, 0);
            }
        }
    }
    for (int i = 0; i < count; i++) num_failed += all[i].is_open;
    qsort(latencies.ns, latencies.count, sizeof *latencies.ns, by_size);
    qsort(firsts.ns, firsts.count, sizeof *firsts.ns, by_size);
    printf("{\"num_ok\": %ld, \"num_failed\": %ld, \"num_events\": %ld, \"seconds\": %.6f, "
           "\"latency_p50_ms\": %.4f, \"latency_p99_ms\": %.4f, "
           "\"ttft_p50_ms\": %.4f, \"ttft_p99_ms\": %.4f}\n",
           num_ok, num_failed, num_events, (double)(last - began) / 1e9,
           quantile_ms(&latencies, 0.5), quantile_ms(&latencies, 0.99),
           quantile_ms(&firsts, 0.5), quantile_ms(&firsts, 0.99));
    return 0;
}
