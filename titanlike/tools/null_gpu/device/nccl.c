// NCCL. Each rank appends what it calls on a communicator to a log, a file that all ranks map: operation, type, size, peer, and the data of messages
// of up to 64 KiB. The logs of all ranks are the record that the order check compares, and the way by which small messages arrive: the host
// waits for a message when it reads the memory that receives it. As with NCCL, a call itself does not wait, unless it sends what has not
// arrived yet.
#include "device.h"
#include <fcntl.h>
#define __CUDA_RUNTIME_H__  // nccl.h includes the header for C++; device.h has the one for C
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 1024, MAX_PENDING = 1024 };
static const size_t LOG_SIZE = (size_t)1 << 32, EXTENT = (size_t)1 << 20;  // of a sparse file, of which an extent at a time gets space

enum operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SPLIT, SEND, RECEIVE, OPERATIONS };
static const char *const operations[] = {
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "split", "send", "receive",
};

// collectives.py reads these two structures.
struct log_header {
    char id[32], name[64];
    int32_t size, rank, global_rank, process;
    atomic_ulong end;
};
struct entry {
    uint32_t operation, type, reduction, peer;  // peer: of a send or receive, or the root
    uint64_t count, stored;                     // elements that this rank sends or receives; bytes of data that follow
};

struct cursor { size_t offset; long passed; };
struct reader {  // of another rank's log
    char *log;
    struct cursor collectives, messages;  // messages: those to this rank
    long received;                        // messages from it that this rank called for
};

struct pending {  // a receive buffer that is written when the host reads it
    struct ncclComm *communicator;
    struct entry entry;
    long number;  // of the collective on its communicator, or of the message from its sender
    char *buffer;
    size_t size;
    struct pending *next;
};

struct ncclComm {
    char id[32], name[64];
    int size, rank;
    long collectives;
    char *log;
    int file;
    size_t end, space;
    struct reader *readers;
    struct pending *first, **last;
    int num_pending;
    atomic_long calls[OPERATIONS], bytes[OPERATIONS];
    struct ncclComm *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *all_communicators;

static size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
    }
}

// Logs
static char *open_log(const char *id, int rank, int *own) {
    const char *folder = getenv("NULL_GPU_FOLDER");
    if (folder == NULL) fail("NULL_GPU_FOLDER is not set; start programs with python -m titanlike.tools.null_gpu");
    char path[512], new_path[520];
    snprintf(path, sizeof path, "%s/%s.%d", folder, id, rank);
    snprintf(new_path, sizeof new_path, "%s.new", path);
    int file = own ? open(new_path, O_RDWR | O_CREAT, 0600) : open(path, O_RDONLY);
    if (file < 0) return NULL;
    // Another rank may open the log at any time. To read a file before it has its size would end that rank with SIGBUS.
    if (own && (ftruncate(file, LOG_SIZE) || rename(new_path, path))) fail("cannot create %s", path);
    char *log = mmap(NULL, LOG_SIZE, own ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (own) *own = file;
    else close(file);
    return log == MAP_FAILED ? NULL : log;
}

static size_t next_entry(size_t offset, const struct entry *entry) { return offset + sizeof *entry + (entry->stored + 63) / 64 * 64; }

// A write to a mapped file without space for it ends the process with SIGBUS.
static void reserve(struct ncclComm *communicator, size_t end) {
    if (end > LOG_SIZE) fail("the log of communicator %s is full", communicator->name);
    if (end <= communicator->space) return;
    size_t space = (end + EXTENT - 1) / EXTENT * EXTENT;
    int error = posix_fallocate(communicator->file, communicator->space, space - communicator->space);
    if (error) fail("no space for the log of communicator %s in %s: %s", communicator->name, getenv("NULL_GPU_FOLDER"), strerror(error));
    communicator->space = space;
}

static void append(struct ncclComm *communicator, struct entry entry, const void *data) {
    size_t end = next_entry(communicator->end, &entry);
    reserve(communicator, end);
    memcpy(communicator->log + communicator->end, &entry, sizeof entry);
    if (place_of(data, NULL) == DEVICE) read_device(communicator->log + communicator->end + sizeof entry, data, entry.stored);
    else memcpy(communicator->log + communicator->end + sizeof entry, data, entry.stored);
    communicator->end = end;
    atomic_store_explicit(&((struct log_header *)communicator->log)->end, end, memory_order_release);
}

static const char *describe(char *text, const struct entry *entry) {
    snprintf(text, 96, "%s of %lu elements, type %u", operations[entry->operation], entry->count, entry->type);
    return text;
}

// Waits for a rank's collective with this number, or for its message with this number to `receiver`.
static struct entry *await(struct ncclComm *communicator, int rank, int receiver, long number, const struct entry *wanted) {
    struct reader *reader = &communicator->readers[rank];
    struct cursor *cursor = receiver < 0 ? &reader->collectives : &reader->messages;
    for (int tries = 0;; tries++) {
        if (reader->log == NULL) reader->log = open_log(communicator->id, rank, NULL);
        struct log_header *header = (struct log_header *)reader->log;
        size_t end = header ? atomic_load_explicit(&header->end, memory_order_acquire) : 0;
        if (cursor->offset == 0) cursor->offset = sizeof *header;
        while (cursor->offset < end) {
            struct entry *entry = (struct entry *)(reader->log + cursor->offset);
            bool matches = receiver < 0 ? entry->operation < SEND : entry->operation == SEND && (int)entry->peer == receiver;
            cursor->offset = next_entry(cursor->offset, entry);
            if (matches && cursor->passed++ == number) return entry;
        }
        const char *limit = getenv("NULL_GPU_TIMEOUT");
        char text[96];
        if (tries > (limit ? atoi(limit) : 300) * 2000)
            fail("rank %d of communicator %s waits for rank %d: %s", communicator->rank, communicator->name, rank, describe(text, wanted));
        usleep(tries < 100 ? 20 : 500);
    }
}

static void expect(struct ncclComm *communicator, int rank, const struct entry *found, const struct entry *wanted) {
    bool ordered = wanted->operation == BROADCAST || wanted->operation == REDUCE;
    bool equal = found->operation == wanted->operation && found->type == wanted->type && found->count == wanted->count;
    char here[96], there[96];
    if (!equal || (ordered && found->peer != wanted->peer))
        fail("communicator %s: rank %d calls %s where rank %d calls %s; NCCL would hang", communicator->name, communicator->rank,
             describe(here, wanted), rank, describe(there, found));
}

// Reductions of small messages
static double get(ncclDataType_t type, const char *data, size_t i) {
    switch (type) {
    case ncclInt8: return ((const int8_t *)data)[i];
    case ncclInt32: return ((const int32_t *)data)[i];
    case ncclUint32: return ((const uint32_t *)data)[i];
    case ncclInt64: return ((const int64_t *)data)[i];
    case ncclUint64: return ((const uint64_t *)data)[i];
    case ncclFloat32: return ((const float *)data)[i];
    case ncclFloat64: return ((const double *)data)[i];
    case ncclBfloat16: { uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16; float value; memcpy(&value, &bits, 4); return value; }
    case ncclUint8: return ((const uint8_t *)data)[i];
    default: return 0;  // float16 and float8: nothing small is reduced in them
    }
}
static void put(ncclDataType_t type, char *data, size_t i, double value) {
    switch (type) {
    case ncclInt8: ((int8_t *)data)[i] = value; break;
    case ncclInt32: ((int32_t *)data)[i] = value; break;
    case ncclUint32: ((uint32_t *)data)[i] = value; break;
    case ncclInt64: ((int64_t *)data)[i] = value; break;
    case ncclUint64: ((uint64_t *)data)[i] = value; break;
    case ncclFloat32: ((float *)data)[i] = value; break;
    case ncclFloat64: ((double *)data)[i] = value; break;
    case ncclBfloat16: { float rounded = value; uint32_t bits; memcpy(&bits, &rounded, 4); ((uint16_t *)data)[i] = bits >> 16; break; }
    case ncclUint8: ((uint8_t *)data)[i] = value; break;
    default: break;
    }
}
static double reduced(unsigned reduction, double a, double b) {
    switch (reduction) {
    case ncclProd: return a * b;
    case ncclMax: return a > b ? a : b;
    case ncclMin: return a < b ? a : b;
    default: return a + b;  // sums, means and sums of products with a factor
    }
}

// Writes what a call receives.
static void complete(struct pending *p) {
    struct ncclComm *c = p->communicator;
    size_t width = size_of(p->entry.type), count = p->entry.count, chunk = count * width;
    char *result = p->buffer;
    bool alone = getenv("NULL_GPU_RANKS") != NULL;  // the other ranks are absent
    if (p->entry.operation == RECEIVE) {
        if (alone) return;
        struct entry *sent = await(c, p->entry.peer, c->rank, p->number, &p->entry);
        if (sent->count * size_of(sent->type) != chunk)
            fail("communicator %s: rank %d receives %zu bytes where rank %u sends %lu", c->name, c->rank, chunk, p->entry.peer,
                 sent->count * size_of(sent->type));
        memcpy(result, sent + 1, sent->stored);
        return;
    }
    struct entry *entry = NULL;
    for (int rank = 0; rank < c->size; rank++) {
        // Alone, all are assumed to send what this rank sends.
        if (!alone || rank == 0) entry = await(c, alone ? c->rank : rank, -1, p->number, &p->entry);
        const char *data = (const char *)(entry + 1);
        expect(c, rank, entry, &p->entry);
        switch (p->entry.operation) {
        case ALL_GATHER: memcpy(result + rank * chunk, data, entry->stored); break;
        case GATHER: if (c->rank == (int)entry->peer) memcpy(result + rank * chunk, data, entry->stored); break;
        case BROADCAST: if (rank == (int)entry->peer) memcpy(result, data, entry->stored); break;
        case SCATTER: if (rank == (int)entry->peer) memcpy(result, data + c->rank * chunk, chunk); break;
        case ALL_TO_ALL: if (entry->stored) memcpy(result + rank * chunk, data + c->rank * chunk, chunk); break;
        case REDUCE: if (c->rank != (int)entry->peer) break;  // fall through
        case ALL_REDUCE: case REDUCE_SCATTER:
            if (!entry->stored) break;
            if (p->entry.operation == REDUCE_SCATTER) data += c->rank * chunk;
            for (size_t i = 0; i < count; i++) {
                double value = get(entry->type, data, i);
                if (rank) value = reduced(entry->reduction, get(entry->type, result, i), value);
                if (rank == c->size - 1 && entry->reduction == ncclAvg) value /= c->size;
                put(entry->type, result, i, value);
            }
        }
    }
}

static void drop_first(struct ncclComm *c) {
    struct pending *done = c->first;
    c->first = done->next;
    if (c->first == NULL) c->last = &c->first;
    c->num_pending--;
    free(done);
}

static bool overlap(const struct pending *p, const char *address, size_t size) { return p->buffer < address + size && address < p->buffer + p->size; }

void complete_messages(const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    for (struct ncclComm *c = all_communicators; c; c = c->next) {
        int needed = 0, position = 0;
        for (struct pending *p = c->first; p; p = p->next) {
            position++;
            if (overlap(p, address, size)) needed = position;
        }
        for (; needed; needed--) {  // those before it, too: the messages of a communicator arrive in order
            complete(c->first);
            wrote(c->first->buffer, c->first->size);
            drop_first(c);
        }
    }
    pthread_mutex_unlock(&lock);
}

// The memory is freed or written anew: what arrives there is of no use.
void discard_messages(const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    for (struct ncclComm *c = all_communicators; c; c = c->next)
        for (struct pending **p = &c->first, *found = *p; found; found = *p) {
            if (overlap(found, address, size)) {
                *p = found->next;
                if (*p == NULL) c->last = p;
                c->num_pending--;
                free(found);
            } else p = &found->next;
        }
    pthread_mutex_unlock(&lock);
}

static ncclResult_t call(
    struct ncclComm *c, enum operation operation, const void *source, size_t source_size, void *target, size_t target_size, size_t count,
    ncclDataType_t type, unsigned reduction, int peer
) {
    if (source_size && source_size <= MOVED) complete_messages(source, source_size);
    bool moved = source_size <= MOVED && target_size <= MOVED;
    struct entry entry = {operation, type, reduction, peer, count, moved ? source_size : 0};
    pthread_mutex_lock(&lock);
    append(c, entry, source);
    c->calls[operation]++;
    c->bytes[operation] += source_size > target_size ? source_size : target_size;
    long number = operation == RECEIVE ? c->readers[peer].received++ : operation == SEND ? 0 : c->collectives++;
    if (moved && target_size) {
        if (c->num_pending == MAX_PENDING) drop_first(c);  // old and never read
        struct pending *p = calloc(1, sizeof *p);
        *p = (struct pending){c, entry, number, target, target_size, NULL};
        *c->last = p;
        c->last = &p->next;
        c->num_pending++;
    }
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    return call(c, ALL_REDUCE, source, count * size_of(type), target, count * size_of(type), count, type, op, 0);
}
ncclResult_t ncclAllGather(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
    return call(c, ALL_GATHER, source, count * size_of(type), target, c->size * count * size_of(type), count, type, 0, 0);
}
ncclResult_t ncclReduceScatter(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    return call(c, REDUCE_SCATTER, source, c->size * count * size_of(type), target, count * size_of(type), count, type, op, 0);
}
ncclResult_t ncclBroadcast(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return call(c, BROADCAST, source, c->rank == root ? count * size_of(type) : 0, target, count * size_of(type), count, type, 0, root);
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}
ncclResult_t ncclReduce(const void *source, void *target, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t stream) {
    return call(c, REDUCE, source, count * size_of(type), target, c->rank == root ? count * size_of(type) : 0, count, type, op, root);
}
ncclResult_t ncclAlltoAll(const void *source, void *target, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
    size_t size = c->size * count * size_of(type);
    return call(c, ALL_TO_ALL, source, size, target, size, count, type, 0, 0);
}
ncclResult_t ncclGather(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return call(c, GATHER, source, count * size_of(type), target, c->rank == root ? c->size * count * size_of(type) : 0, count, type, 0, root);
}
ncclResult_t ncclScatter(const void *source, void *target, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return call(c, SCATTER, source, c->rank == root ? c->size * count * size_of(type) : 0, target, count * size_of(type), count, type, 0, root);
}
ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
    return call(c, SEND, source, count * size_of(type), NULL, 0, count, type, 0, peer);
}
ncclResult_t ncclRecv(void *target, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
    return call(c, RECEIVE, NULL, 0, target, count * size_of(type), count, type, 0, peer);
}

// Communicators
static int environment_rank(void) {
    const char *rank = getenv("RANK");
    return rank ? atoi(rank) : 0;
}

static struct ncclComm *new_communicator(const char *id, int size, int rank, const char *name) {
    if (size > MAX_RANKS) fail("a communicator of %d ranks; the null device has at most %d", size, MAX_RANKS);
    struct ncclComm *c = calloc(1, sizeof *c);
    snprintf(c->id, sizeof c->id, "%s", id);
    snprintf(c->name, sizeof c->name, "%s", name && name != NCCL_CONFIG_UNDEF_PTR ? name : id);
    c->size = size;
    c->rank = rank;
    c->readers = calloc(size, sizeof *c->readers);
    c->last = &c->first;
    c->log = open_log(id, rank, &c->file);
    if (c->log == NULL) fail("cannot create the log of communicator %s", id);
    struct log_header *header = (struct log_header *)c->log;
    reserve(c, sizeof *header);
    memcpy(header->id, c->id, sizeof c->id);
    memcpy(header->name, c->name, sizeof c->name);
    header->size = size;
    header->rank = rank;
    header->global_rank = environment_rank();
    header->process = getpid();
    c->end = sizeof *header;
    atomic_store_explicit(&header->end, c->end, memory_order_release);
    pthread_mutex_lock(&lock);
    c->next = all_communicators;
    all_communicators = c;
    pthread_mutex_unlock(&lock);
    return c;
}

static uint64_t hash(const void *data, size_t size, uint64_t value) {
    for (size_t i = 0; i < size; i++) value = (value ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return value;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return getrandom(id, sizeof *id, 0) == sizeof *id ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int size, ncclUniqueId unique, int rank, ncclConfig_t *configuration) {
    char id[32];
    snprintf(id, sizeof id, "%016lx", hash(&unique, sizeof unique, 0xCBF29CE484222325u));
    *c = new_communicator(id, size, rank, configuration ? configuration->commName : NULL);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(c, size, id, rank, NULL); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int size, int rank, int count, ncclUniqueId *ids, ncclConfig_t *configuration) {
    return ncclCommInitRankConfig(c, size, ids[0], rank, configuration);
}

static void complete_all(struct ncclComm *c) {
    pthread_mutex_lock(&lock);
    while (c->first) {
        complete(c->first);
        drop_first(c);
    }
    pthread_mutex_unlock(&lock);
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *child, ncclConfig_t *configuration) {
    int32_t own[2] = {color, key}, all[MAX_RANKS][2], rank = 0, size = 0;
    long number = c->collectives;
    call(c, SPLIT, own, sizeof own, NULL, 0, 2, ncclInt32, 0, 0);
    struct entry wanted = {.operation = SPLIT, .type = ncclInt32, .count = 2};
    complete_all(c);
    pthread_mutex_lock(&lock);
    for (int r = 0; r < c->size; r++) {
        struct entry *entry = await(c, r, -1, number, &wanted);
        expect(c, r, entry, &wanted);
        memcpy(all[r], entry + 1, sizeof all[r]);
    }
    pthread_mutex_unlock(&lock);
    for (int r = 0; r < c->size; r++) {
        if (all[r][0] != color) continue;
        size++;
        if (all[r][1] < key || (all[r][1] == key && r < c->rank)) rank++;
    }
    *child = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    char id[32];
    uint64_t value = hash(&color, sizeof color, hash(&number, sizeof number, hash(c->id, strlen(c->id), 0xCBF29CE484222325u)));
    snprintf(id, sizeof id, "%016lx", value);
    *child = new_communicator(id, size, rank, configuration ? configuration->commName : NULL);
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *count) { *count = c->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { *rank = c->rank; return ncclSuccess; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **address, size_t size) { return cudaMalloc(address, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclMemFree(void *address) { cudaFree(address); return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t c) {
    *op = ncclNumOps;
    return ncclSuccess;
}

void print_communicators(FILE *file) {
    const char *separator = "";
    fprintf(file, "[");
    pthread_mutex_lock(&lock);
    for (struct ncclComm *c = all_communicators; c; c = c->next) {
        fprintf(file, "%s[\"%s\", \"%s\", %d, %d, {", separator, c->id, c->name, c->size, c->rank);
        const char *comma = "";
        for (int o = 0; o < OPERATIONS; o++) {
            if (c->calls[o] == 0) continue;
            fprintf(file, "%s\"%s\": [%ld, %ld]", comma, operations[o], c->calls[o], c->bytes[o]);
            comma = ", ";
        }
        fprintf(file, "}]");
        separator = ", ";
    }
    pthread_mutex_unlock(&lock);
    fprintf(file, "]");
}
