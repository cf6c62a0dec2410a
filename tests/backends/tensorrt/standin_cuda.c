/* A stand-in for the CUDA driver and for NVML, for machines without a GPU: as much as headrace_tensorrt.cuda calls.
 *
 * Device memory is host memory. What is put on a stream runs when somebody waits for it and not before, so that a wait
 * that is missing shows; a copy that leaves its memory, and a call by a thread that has not entered a device, fail.
 * STANDIN_GPUS says how many GPUs there are (2), STANDIN_MEMORY_BYTES how much memory each has.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700 };

typedef void (*Work)(void *);
typedef struct Op { struct Op *next; int kind; char *to, *from; size_t bytes; Work work; void *given; } Op;
typedef struct { Op *first, *last; } Queue;
typedef struct { Queue queue, captured; int capturing, device; } Stream;
typedef struct { Queue ops; } Graph;
typedef struct { Stream *stream; } Event;
typedef struct Block { struct Block *next; char *begin; size_t bytes; int device; } Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t used_bytes[16], pinned_count, copied_in, copied_out, graph_launches, live_objects, begun;
static int contexts[16], broken, fail_next;
static __thread int *current;

static int gpus(void) { const char *text = getenv("STANDIN_GPUS"); return text ? atoi(text) : 2; }
static size_t memory(void) {
    const char *text = getenv("STANDIN_MEMORY_BYTES");
    return text ? strtoull(text, NULL, 10) : (size_t)1 << 40;
}
static int entered(void) { return broken ? broken : current ? 0 : INVALID_CONTEXT; }

int cuInit(unsigned flags) { return flags ? INVALID : gpus() ? 0 : 100; }
int cuDeviceGetCount(int *count) { *count = gpus(); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < gpus() ? 0 : INVALID_DEVICE; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (device ? 8 : 9) : attribute == 76 ? (device ? 9 : 0) : -1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; contexts[device] = device; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return broken; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return entered(); }
int cuGetErrorName(int result, const char **name) {
    *name = result == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : result == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : result == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return 0;
}
int cuGetErrorString(int result, const char **text) {
    *text = result == OUT_OF_MEMORY ? "out of memory" : result == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
          : result == INVALID_CONTEXT ? "invalid device context" : NULL;
    return 0;
}

/* Whether bytes at address lie in one block of the calling thread's device. */
static int is_inside(char *address, size_t bytes) {
    for (Block *each = blocks; each; each = each->next)
        if (each->begin <= address && address + bytes <= each->begin + each->bytes) return each->device == *current;
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (entered()) return entered();
    pthread_mutex_lock(&lock);
    int device = *current, is_full = used_bytes[device] + bytes > memory();
    if (!is_full) {
        Block *block = malloc(sizeof *block);
        *block = (Block){blocks, aligned_alloc(256, (bytes + 255) & ~(size_t)255), bytes, device};
        memset(block->begin, 0xAB, bytes); /* nobody may count on zeros */
        blocks = block;
        used_bytes[device] += bytes;
        *address = (uint64_t)block->begin;
    }
    pthread_mutex_unlock(&lock);
    return is_full ? OUT_OF_MEMORY : 0;
}
int cuMemFree_v2(uint64_t address) {
    pthread_mutex_lock(&lock);
    int result = INVALID;
    for (Block **each = &blocks; *each; each = &(*each)->next)
        if ((*each)->begin == (char *)address) {
            Block *gone = *each;
            *each = gone->next;
            used_bytes[gone->device] -= gone->bytes;
            free(gone->begin);
            free(gone);
            result = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    if (entered()) return entered();
    *pointer = malloc(bytes);
    __sync_fetch_and_add(&pinned_count, 1);
    return flags == 1 ? 0 : INVALID;
}
int cuMemFreeHost(void *pointer) {
    if (entered()) return entered();
    free(pointer);
    __sync_fetch_and_sub(&pinned_count, 1);
    return 0;
}

int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    if (entered()) return entered();
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = *current;
    __sync_fetch_and_add(&live_objects, 1);
    return flags == 1 && priority <= 0 && priority >= -5 ? 0 : INVALID;
}
static void add(Stream *stream, Op op) {
    Queue *queue = stream->capturing ? &stream->captured : &stream->queue;
    Op *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    if (queue->last) queue->last->next = kept; else queue->first = kept;
    queue->last = kept;
    if (!stream->capturing) __sync_fetch_and_add(&begun, 1);
}
static void run(const Op *op) {
    if (op->kind) memcpy(op->to, op->from, op->bytes); else op->work(op->given);
}
static int drain(Stream *stream) {
    Op *next = stream->queue.first;
    stream->queue = (Queue){0};
    while (next) {
        Op *op = next;
        next = op->next;
        run(op);
        free(op);
        __sync_fetch_and_sub(&begun, 1);
    }
    if (fail_next) { broken = fail_next; fail_next = 0; }
    return broken;
}
int cuStreamSynchronize(Stream *stream) { return drain(stream); }
int cuStreamDestroy_v2(Stream *stream) { free(stream); __sync_fetch_and_sub(&live_objects, 1); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, void *from, size_t bytes, Stream *stream) {
    if (entered()) return entered();
    pthread_mutex_lock(&lock);
    int inside = is_inside((char *)to, bytes);
    pthread_mutex_unlock(&lock);
    if (!inside) return broken = ILLEGAL_ADDRESS;
    add(stream, (Op){NULL, 1, (char *)to, from, bytes, NULL, NULL});
    __sync_fetch_and_add(&copied_in, 1);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *stream) {
    if (entered()) return entered();
    pthread_mutex_lock(&lock);
    int inside = is_inside((char *)from, bytes);
    pthread_mutex_unlock(&lock);
    if (!inside) return broken = ILLEGAL_ADDRESS;
    add(stream, (Op){NULL, 1, to, (char *)from, bytes, NULL, NULL});
    __sync_fetch_and_add(&copied_out, 1);
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream *stream) {
    if (entered()) return entered();
    pthread_mutex_lock(&lock);
    int inside = is_inside((char *)to, bytes);
    pthread_mutex_unlock(&lock);
    if (!inside) return broken = ILLEGAL_ADDRESS;
    memset((char *)to, value, bytes);
    return stream ? 0 : INVALID;
}
int cuEventCreate(Event **event, unsigned flags) {
    if (entered()) return entered();
    *event = calloc(1, sizeof **event);
    __sync_fetch_and_add(&live_objects, 1);
    return flags == 2 || flags == 3 ? 0 : INVALID;
}
int cuEventRecord(Event *event, Stream *stream) { event->stream = stream; return entered(); }
int cuEventSynchronize(Event *event) { return event->stream ? drain(event->stream) : 0; }
int cuEventDestroy_v2(Event *event) { free(event); __sync_fetch_and_sub(&live_objects, 1); return 0; }

int cuStreamBeginCapture_v2(Stream *stream, int mode) { stream->capturing = 1; return mode == 1 ? entered() : INVALID; }
int cuStreamEndCapture(Stream *stream, Graph **graph) {
    if (!stream->capturing) return INVALID;
    *graph = calloc(1, sizeof **graph);
    (*graph)->ops = stream->captured;
    stream->captured = (Queue){0};
    stream->capturing = 0;
    __sync_fetch_and_add(&live_objects, 1);
    return 0;
}
int cuGraphInstantiateWithFlags(Graph **ready, Graph *graph, unsigned long long flags) {
    *ready = calloc(1, sizeof **ready);
    (*ready)->ops = graph->ops; /* the operations of a graph are never freed: there are few */
    __sync_fetch_and_add(&live_objects, 1);
    return flags ? INVALID : 0;
}
int cuGraphDestroy(Graph *graph) { free(graph); __sync_fetch_and_sub(&live_objects, 1); return 0; }
int cuGraphExecDestroy(Graph *ready) { return cuGraphDestroy(ready); }
int cuGraphLaunch(Graph *ready, Stream *stream) {
    if (entered()) return entered();
    for (Op *op = ready->ops.first; op; op = op->next) add(stream, *op);
    __sync_fetch_and_add(&graph_launches, 1);
    return 0;
}

/* What CUDA has no name for: a kernel, and what the tests ask. */
void standin_launch(Stream *stream, Work work, void *given) { add(stream, (Op){NULL, 0, NULL, NULL, 0, work, given}); }
void standin_break_next_wait(int code) { fail_next = code; }
void standin_mend(void) { broken = fail_next = 0; }
size_t standin_used_bytes(int device) { return used_bytes[device]; }
size_t standin_pinned_count(void) { return pinned_count; }
size_t standin_copies_in(void) { return copied_in; }
size_t standin_copies_out(void) { return copied_out; }
size_t standin_graph_launches(void) { return graph_launches; }
size_t standin_begun(void) { return begun; }
size_t standin_live_objects(void) { return live_objects; }

/* CUDA's GPU 0 is the last on the bus, so that whoever mistakes the one order for the other is found out. */
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    return snprintf(text, length, "0000:%02x:00.0", 16 - device) < 0 ? INVALID : 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, intptr_t *handle) {
    *handle = strtol(text + 5, NULL, 16);
    return 0;
}
/* STANDIN_USED_PERCENT has what is in use of each GPU, in CUDA's order: "90 10". */
int nvmlDeviceGetMemoryInfo(intptr_t handle, unsigned long long *memory) {
    const char *text = getenv("STANDIN_USED_PERCENT");
    char *rest = (char *)(text ? text : "0 0");
    long percent = 0;
    for (intptr_t bus = 16; bus >= handle; bus--) percent = strtol(rest, &rest, 10);
    memory[0] = 100, memory[1] = 100 - percent, memory[2] = percent;
    return 0;
}
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpus(); return 0; }
