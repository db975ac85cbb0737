/* A worker that answers at once, like an engine that computes nothing: one thread, epoll.
 *
 *     worker PORT ROLE        ROLE: regular, prefill or decode
 *
 * It answers the requests that sglang-router and a passthrough send to a worker: health, facts
 * about the server, and completions. A completion is plain, or a stream with one event for each of
 * `max_tokens` tokens. A prefill draws one token.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_EVENTS = 256, READ_BYTES = 65536 };

struct buffer {
    char *bytes;
    size_t length, room;
};

struct connection {
    int fd;
    struct buffer in, out;
};

static const char *role;
static int poller;

static void append(struct buffer *to, const void *bytes, size_t n) {
    if (to->length + n + 1 > to->room) {
        to->room = 2 * (to->length + n + 1);
        to->bytes = realloc(to->bytes, to->room);
        if (!to->bytes) exit(2);
    }
    memcpy(to->bytes + to->length, bytes, n);
    to->length += n;
    to->bytes[to->length] = 0;
}

static void drop(struct buffer *of, size_t n) {
    memmove(of->bytes, of->bytes + n, of->length - n + 1);
    of->length -= n;
}

static void say(struct connection *c, const char *status, const char *body) {
    char head[256];
    int n = snprintf(head, sizeof head,
                     "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                     status, strlen(body));
    append(&c->out, head, (size_t)n);
    append(&c->out, body, strlen(body));
}

static void say_chunk(struct connection *c, const char *data) {
    char size[32];
    int n = snprintf(size, sizeof size, "%zx\r\n", strlen(data));
    append(&c->out, size, (size_t)n);
    append(&c->out, data, strlen(data));
    append(&c->out, "\r\n", 2);
}

static long number_of(const char *body, const char *name, long otherwise) {
    const char *at = strstr(body, name);
    if (!at) return otherwise;
    at += strlen(name);
    while (*at == ' ' || *at == ':') at++;
    return *at >= '0' && *at <= '9' ? atol(at) : otherwise;
}

static void stream(struct connection *c, long num_tokens) {
    const char *head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                       "transfer-encoding: chunked\r\n\r\n";
    append(&c->out, head, strlen(head));
    for (long i = 0; i < num_tokens; i++) {
        char event[512];
        snprintf(event, sizeof event,
                 "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":"
                 "1700000000,\"model\":\"default\",\"choices\":[{\"index\":0,\"delta\":{\"content\":"
                 "\" word\"},\"finish_reason\":%s}]}\n\n",
                 i + 1 == num_tokens ? "\"length\"" : "null");
        say_chunk(c, event);
    }
    say_chunk(c, "data: [DONE]\n\n");
    append(&c->out, "0\r\n\r\n", 5);
}

static void complete(struct connection *c, const char *body) {
    char answer[1024];
    long num_tokens = number_of(body, "\"max_tokens\"", 16);
    if (num_tokens < 1 || !strcmp(role, "prefill")) num_tokens = 1;
    if (strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true")) {
        stream(c, num_tokens);
        return;
    }
    snprintf(answer, sizeof answer,
             "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1700000000,"
             "\"model\":\"default\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
             "\"content\":\" word\"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":10,"
             "\"completion_tokens\":%ld,\"total_tokens\":%ld}}",
             num_tokens, num_tokens + 10);
    say(c, "200 OK", answer);
}

static int begins(const char *path, const char *with) {
    return !strncmp(path, with, strlen(with));
}

static void handle(struct connection *c, const char *path, const char *body) {
    char facts[512];
    if (strstr(path, "completions")) {
        complete(c, body);
    } else if (begins(path, "/health") || begins(path, "/liveness") || begins(path, "/readiness")) {
        say(c, "200 OK", "{\"status\":\"ok\"}");
    } else if (begins(path, "/v1/models")) {
        say(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"default\",\"object\":\"model\"}]}");
    } else if (begins(path, "/get_server_info") || begins(path, "/server_info")) {
        snprintf(facts, sizeof facts,
                 "{\"model_path\":\"default\",\"served_model_name\":\"default\",\"tp_size\":1,"
                 "\"dp_size\":1,\"disaggregation_mode\":\"%s\",\"version\":\"0.5.0\","
                 "\"max_running_requests\":2048,\"max_total_num_tokens\":1000000}",
                 strcmp(role, "regular") ? role : "null");
        say(c, "200 OK", facts);
    } else if (begins(path, "/get_model_info") || begins(path, "/model_info")) {
        say(c, "200 OK", "{\"model_path\":\"default\",\"tokenizer_path\":\"default\","
                         "\"is_generation\":true,\"model_type\":\"llama\"}");
    } else {
        say(c, "404 Not Found", "{}");
    }
}

/* Answers the requests that have arrived whole. */
static void answer(struct connection *c) {
    for (;;) {
        char *stop = c->in.length ? strstr(c->in.bytes, "\r\n\r\n") : NULL;
        char path[256] = "";
        size_t head, body = 0;
        if (!stop) return;
        head = (size_t)(stop - c->in.bytes) + 4;
        for (char *line = strstr(c->in.bytes, "\r\n"); line && line < stop;
             line = strstr(line + 2, "\r\n"))
            if (!strncasecmp(line + 2, "content-length:", 15)) body = (size_t)atol(line + 17);
        if (c->in.length < head + body) return;
        sscanf(c->in.bytes, "%*s %255s", path);
        char kept = c->in.bytes[head + body];
        c->in.bytes[head + body] = 0;
        handle(c, path, c->in.bytes + head);
        c->in.bytes[head + body] = kept;
        drop(&c->in, head + body);
    }
}

static void wait_for(struct connection *c, int operation, unsigned events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(poller, operation, c->fd, &event);
}

/* Returns 0 if the connection is broken. */
static int flush(struct connection *c) {
    while (c->out.length) {
        ssize_t n = send(c->fd, c->out.bytes, c->out.length, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            wait_for(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return 1;
        }
        if (n <= 0) return 0;
        drop(&c->out, (size_t)n);
    }
    wait_for(c, EPOLL_CTL_MOD, EPOLLIN);
    return 1;
}

static int serve(struct connection *c) {
    static char data[READ_BYTES];
    ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
    if (n > 0) append(&c->in, data, (size_t)n);
    answer(c);
    return flush(c);
}

int main(int argc, char **argv) {
    struct epoll_event ready[MAX_EVENTS];
    struct sockaddr_in at = {.sin_family = AF_INET};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1, fd;
    if (argc != 3) {
        fprintf(stderr, "worker PORT ROLE\n");
        return 2;
    }
    role = argv[2];
    signal(SIGPIPE, SIG_IGN);
    at.sin_port = htons((unsigned short)atoi(argv[1]));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) {
        perror("bind");
        return 2;
    }
    poller = epoll_create1(0);
    struct connection door = {.fd = listener};
    wait_for(&door, EPOLL_CTL_ADD, EPOLLIN);
    for (;;) {
        int n = epoll_wait(poller, ready, MAX_EVENTS, -1);
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            if (c == &door) {
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    c = calloc(1, sizeof *c);
                    if (!c) exit(2);
                    c->fd = fd;
                    wait_for(c, EPOLL_CTL_ADD, EPOLLIN);
                }
            } else if (!serve(c)) {
                close(c->fd);
                free(c->in.bytes);
                free(c->out.bytes);
                free(c);
            }
        }
    }
}
