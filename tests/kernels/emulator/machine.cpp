// Runs one launch on the CPU, a threadgroup at a time. Every GPU thread is a fiber that gives way
// only at barriers and simdgroup operations; threads and threadgroups run in an order shuffled by
// a seed. Findings end the launch with a sentence.
#include "machine.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "half.h"

namespace emu {

Thread* self;
Group group;
Buffer* arguments;

namespace {

enum State { READY, AT_SIMD, AT_BARRIER, AT_PART_BARRIER, DONE };

struct Simdgroup {
  int waiting, done, op, line;
  const char* file;
  uint32_t value[SIMD], result[SIMD];
  int argument[SIMD];
  uint32_t epoch;
  float c[SIMD][4];
  uint32_t a[SIMD][4], b[SIMD][2];
};

struct Fiber {
  Thread thread;
  Simdgroup* simdgroup;
  State state;
  bool started;
  int line;
  const char* file;
  char* stack;
  ucontext_t context;
  jmp_buf jump;
};

struct Shared {
  int line, phase;
  const char* name;
  Buffer buffer;
  std::vector<unsigned char> memory;
  std::vector<Shadow> shadow;
};

const size_t STACK = 128 << 10;
std::vector<Fiber> fibers;
std::vector<Simdgroup> simdgroups;
std::vector<uint32_t> ready;
std::vector<std::unique_ptr<Shared>> shared;
std::vector<char*> stacks;
int done;
// One for all threads, one for those that have work in a phase of a chain.
struct Barrier { int waiting, line, scope; const char* file; } barriers[2];
int64_t shared_bytes, shared_limit, most_shared, switches;
int shared_phase, counted_phase;  // memory is carved anew in each phase; -1 outside of any
jmp_buf scheduler, failure;
uint64_t random_state;
uint32_t seed;
char* message;
int message_size;
const char* kernel;
void (*body)();

Fiber& fiber() { return fibers[self->id]; }

EMU_WRAPS uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t((random_state >> 11) % n);
}

__attribute__((noinline)) void give_way() {
  switches++;
  if (!_setjmp(fiber().jump)) _longjmp(scheduler, 1);
}

void wake(Fiber& f) {
  f.state = READY;
  ready.push_back(f.thread.id);
}

template <class T>
T as(uint32_t bits) {
  T v;
  std::memcpy(&v, &bits, 4);
  return v;
}

// The ascending butterfly 1, 2, 4, 8, 16: the tree of the CUDA prelude and of Apple's simd_sum.
template <class T>
void reduce(Simdgroup& s, int op) {
  T v[SIMD], r[SIMD];
  std::memcpy(v, s.value, sizeof v);
  for (int mask = 1; mask < SIMD; mask <<= 1) {
    for (int i = 0; i < SIMD; i++) {
      const T a = v[i], b = v[i ^ mask];
      r[i] = op == SUM ? T(a + b) : op == MAX ? (b > a ? b : a) : (b < a ? b : a);
    }
    std::memcpy(v, r, sizeof v);
  }
  std::memcpy(s.result, v, sizeof v);
}

EMU_WRAPS void exchange(Simdgroup& s, int op) {
  for (int i = 0; i < SIMD; i++) {
    int from = s.argument[i];
    if (op == XOR) from = i ^ from;
    if (op == DOWN) from = i + from;
    if (from >= 0 && from < SIMD)
      s.result[i] = s.value[from];
    else if (op == DOWN)
      s.result[i] = 0xffffffffu;  // undefined in Metal: poison
    else
      fail("simd shuffle from lane %d (%s:%d)", from, s.file, s.line);
  }
}

float element(uint32_t word, int half, bool bfloat) {
  const uint16_t bits = uint16_t(half ? word >> 16 : word);
  if (!bfloat) return emu_half::decode(bits);
  emu_bfloat b;
  b.bits = bits;
  return float(b);
}

// C[16, 8] += A[16, 16] B[16, 8] in the fragment layout of mma.m16n8k16.
void multiply(Simdgroup& s, bool bfloat) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < SIMD; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; r++)
      for (int h = 0; h < 2; h++)
        a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + h] = element(s.a[lane][r], h, bfloat);
    for (int r = 0; r < 2; r++)
      for (int h = 0; h < 2; h++) b[2 * t + 8 * r + h][g] = element(s.b[lane][r], h, bfloat);
  }
  for (int lane = 0; lane < SIMD; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; r++) {
      float sum = s.c[lane][r];
      for (int k = 0; k < 16; k++) sum += a[g + 8 * (r / 2)][k] * b[k][2 * t + r % 2];
      s.c[lane][r] = sum;
    }
  }
}

// Count this lane in; true for the last of the 32, which then does the work and wakes the rest.
bool arrive(Simdgroup& s, int tag, const char* file, int line) {
  if (s.done)
    fail("simd operation (%s:%d) after %d lane(s) of the simdgroup returned", file, line, s.done);
  if (s.waiting && (s.op != tag || s.line != line || s.file != file))
    fail("divergent simd operation: this lane is at %s:%d, others wait at %s:%d", file, line,
         s.file, s.line);
  s.op = tag;
  s.line = line;
  s.file = file;
  return ++s.waiting == SIMD;
}

void leave_last(Simdgroup& s) {
  s.waiting = 0;
  const uint32_t first = self->simdgroup * SIMD;
  for (uint32_t i = first; i < first + SIMD; i++)
    if (fibers[i].state == AT_SIMD) wake(fibers[i]);
  if (seed) {  // let another thread go first
    wake(fiber());
    give_way();
  }
}

void wait_at(State state, const char* file, int line) {
  Fiber& f = fiber();
  f.state = state;
  f.file = file;
  f.line = line;
  give_way();
}

void entry() {
  body();
  Fiber& f = fiber();
  f.state = DONE;
  done++;
  Simdgroup& s = *f.simdgroup;
  s.done++;
  if (s.waiting)
    fail("thread returned while %d lane(s) of its simdgroup wait at %s:%d", s.waiting, s.file,
         s.line);
  for (const Barrier& b : barriers)
    if (b.waiting)
      fail("thread returned while %d thread(s) wait at the barrier %s:%d", b.waiting, b.file,
           b.line);
  _longjmp(scheduler, 1);
}

void start_threads() {
  group.shared_epoch = group.device_epoch = 1;
  barriers[0].waiting = barriers[1].waiting = done = 0;
  shared.clear();
  shared_bytes = 0;
  shared_limit = SHARED_LIMIT;
  shared_phase = counted_phase = -1;
  ready.clear();
  for (auto& s : simdgroups) {
    s.waiting = s.done = 0;
    s.epoch = 1;
  }
  const uint3 size = group.size, at = group.position;
  for (uint32_t t = 0; t < group.threads; t++) {
    Fiber& f = fibers[t];
    f.started = false;
    f.state = READY;
    f.simdgroup = &simdgroups[t / SIMD];
    f.stack = stacks[t];
    const uint3 p = {t % size.x, t / size.x % size.y, t / (size.x * size.y)};
    const uint3 g = {at.x * size.x + p.x, at.y * size.y + p.y, at.z * size.z + p.z};
    f.thread = Thread{t, t % SIMD, t / SIMD, p, g, &f.simdgroup->epoch, 0, 0};
    ready.push_back(group.threads - 1 - t);  // taken from the back: thread 0 first
  }
}

void report_dead_lock() {
  std::string who;
  int shown = 0;
  for (auto& f : fibers) {
    if (f.state == DONE || shown++ >= 4) continue;
    char text[128];
    std::snprintf(text, sizeof text, " thread %u at %s %s:%d;", f.thread.id,
                  f.state == AT_SIMD ? "simd operation" : "barrier", f.file, f.line);
    who += text;
  }
  fail("dead lock in threadgroup (%u,%u,%u): %u of %u threads never finish:%s", group.position.x,
       group.position.y, group.position.z, group.threads - uint32_t(done), group.threads,
       who.c_str());
}

void run_group() {
  start_threads();
  while (!ready.empty()) {
    if (seed) std::swap(ready[random_below(uint32_t(ready.size()))], ready.back());
    Fiber& f = fibers[ready.back()];
    ready.pop_back();
    self = &f.thread;
    if (!_setjmp(scheduler)) {
      Fiber& next = fiber();
      if (next.started) _longjmp(next.jump, 1);
      next.started = true;
      getcontext(&next.context);
      next.context.uc_stack.ss_sp = next.stack;
      next.context.uc_stack.ss_size = STACK;
      next.context.uc_link = nullptr;
      makecontext(&next.context, entry, 0);
      setcontext(&next.context);
    }
  }
  self = nullptr;
  if (done != int(group.threads)) report_dead_lock();
}

void need_stacks(uint32_t count) {
  while (stacks.size() < count) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* p = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0));
    mprotect(p, 4096, PROT_NONE);
    stacks.push_back(p);
  }
}

void set_geometry(const int* groups, const int* size) {
  group.size = uint3{uint(size[0]), uint(size[1]), uint(size[2])};
  group.count = uint3{uint(groups[0]), uint(groups[1]), uint(groups[2])};
  group.grid = uint3{group.size.x * group.count.x, group.size.y * group.count.y,
                     group.size.z * group.count.z};
  group.threads = group.size.x * group.size.y * group.size.z;
  group.simdgroups = group.threads / SIMD;
  if (group.threads == 0 || group.threads % SIMD || group.threads > MAX_THREADS)
    fail("threadgroup of %u threads: must be a multiple of 32, at most 1024", group.threads);
  fibers.resize(group.threads);
  simdgroups.resize(group.simdgroups);
  need_stacks(group.threads);
}

void run_groups() {
  const uint3 n = group.count;
  std::vector<uint32_t> order(n.x * n.y * n.z);
  for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
  if (seed)
    for (uint32_t i = uint32_t(order.size()); i > 1; i--)
      std::swap(order[i - 1], order[random_below(i)]);
  for (uint32_t linear : order) {
    group.linear = linear;
    group.position = uint3{linear % n.x, linear / n.x % n.y, linear / (n.x * n.y)};
    run_group();
  }
}

}  // namespace

void fail(const char* format, ...) {
  int k = 0;
  if (self)
    k = std::snprintf(message, size_t(message_size),
                      "%s: threadgroup (%u,%u,%u) thread %u (simdgroup %u lane %u): ", kernel,
                      group.position.x, group.position.y, group.position.z, self->id,
                      self->simdgroup, self->lane);
  else
    k = std::snprintf(message, size_t(message_size), "%s: ", kernel);
  va_list arguments_list;
  va_start(arguments_list, format);
  if (k < message_size)
    std::vsnprintf(message + k, size_t(message_size - k), format, arguments_list);
  va_end(arguments_list);
  _longjmp(failure, 1);
}

void after_others() {
  ready.insert(ready.begin(), self->id);
  give_way();
}

void pool(int64_t bytes) { shared_limit = bytes; }

void phase(int p) {
  self->phase = p;
  self->awaited = -1;
  shared_phase = p;
}

Buffer* shared_buffer(int line, const char* name, int64_t count, int item) {
  if (shared_phase != counted_phase) shared_bytes = 0;
  counted_phase = shared_phase;
  for (auto& s : shared)
    if (s->line == line && s->phase == shared_phase && !std::strcmp(s->name, name))
      return &s->buffer;
  std::unique_ptr<Shared> s(new Shared);
  s->line = line;
  s->phase = shared_phase;
  s->name = name;
  s->memory.assign(size_t(count * item + 16), 0xCD);
  s->shadow.assign(size_t(count), Shadow());
  s->buffer = Buffer{name, s->memory.data(), count, SHARED, s->shadow.data(), false, 0, 0};
  shared_bytes += (count * item + 15) / 16 * 16;
  if (shared_bytes > most_shared) most_shared = shared_bytes;
  if (shared_bytes > shared_limit)
    fail("threadgroup memory %lld bytes, limit %lld", (long long)shared_bytes,
         (long long)shared_limit);
  shared.push_back(std::move(s));
  return &shared.back()->buffer;
}

void barrier(int scope, const char* file, int line, int threads) {
  Barrier& b = barriers[threads > 0];
  if (done)
    fail("barrier (%s:%d) after %d thread(s) of the threadgroup returned", file, line, done);
  if (b.waiting && (b.line != line || b.file != file || b.scope != scope))
    fail("divergent barrier: this thread is at %s:%d, others wait at %s:%d", file, line, b.file,
         b.line);
  b.line = line;
  b.file = file;
  b.scope = scope;
  const State state = threads > 0 ? AT_PART_BARRIER : AT_BARRIER;
  if (++b.waiting < (threads > 0 ? threads : int(group.threads))) return wait_at(state, file, line);
  b.waiting = 0;
  if (scope & SCOPE_SHARED) group.shared_epoch++;
  if (scope & SCOPE_DEVICE) group.device_epoch++;
  for (auto& f : fibers)
    if (f.state == state) wake(f);
  if (seed) {
    wake(fiber());
    give_way();
  }
}

uint32_t simd(int op, int type, uint32_t bits, int argument, const char* file, int line) {
  Simdgroup& s = *fiber().simdgroup;
  const uint lane = self->lane;
  const bool last = arrive(s, op * 4 + type, file, line);
  s.value[lane] = bits;
  s.argument[lane] = argument;
  if (!last) {
    wait_at(AT_SIMD, file, line);
    return s.result[lane];
  }
  if (op == SYNC)
    s.epoch++;
  else if (op >= SHUFFLE)
    exchange(s, op);
  else if (type == FLOAT)
    reduce<float>(s, op);
  else if (type == INT)
    reduce<int>(s, op);
  else
    reduce<uint>(s, op);
  leave_last(s);
  return s.result[lane];
}

void simd_mma(float* c, const uint32_t* a, const uint32_t* b, bool bfloat, const char* file,
              int line) {
  Simdgroup& s = *fiber().simdgroup;
  const uint lane = self->lane;
  const bool last = arrive(s, 100 + bfloat, file, line);
  std::memcpy(s.c[lane], c, sizeof s.c[lane]);
  std::memcpy(s.a[lane], a, sizeof s.a[lane]);
  std::memcpy(s.b[lane], b, sizeof s.b[lane]);
  if (last) {
    multiply(s, bfloat);
    leave_last(s);
  } else {
    wait_at(AT_SIMD, file, line);
  }
  std::memcpy(c, s.c[lane], sizeof s.c[lane]);
}

}  // namespace emu

// Runs a launch of `groups` threadgroups of `size` threads; 0, or 1 with `text` set.
extern "C" EMU_WRAPS int emu_run(const char* name, void (*body)(), EmuArgument* list, int count,
                                 const int* groups, const int* size, uint32_t seed, char* text,
                                 int text_size, int64_t* statistics) {
  using namespace emu;
  static std::vector<Buffer> buffers;
  static std::vector<std::vector<Shadow>> shadows;
  text[0] = 0;
  message = text;
  message_size = text_size;
  emu::body = body;
  kernel = name;
  self = nullptr;
  switches = most_shared = 0;
  emu::seed = seed;
  random_state = 0x9e3779b97f4a7c15ull ^ (uint64_t(seed) << 20);
  if (_setjmp(failure)) {
    self = nullptr;
    return 1;
  }
  buffers.assign(size_t(count), Buffer());
  shadows.assign(size_t(count), std::vector<Shadow>());
  for (int i = 0; i < count; i++) {
    const EmuArgument& a = list[i];
    if (a.kind == OUTPUT) shadows[size_t(i)].assign(size_t(a.size), Shadow());
    buffers[size_t(i)] =
        Buffer{a.name, static_cast<unsigned char*>(a.data), a.size, Kind(a.kind),
               shadows[size_t(i)].data(), a.preset != 0, 0, 0};
  }
  arguments = buffers.data();
  set_geometry(groups, size);
  run_groups();
  for (int i = 0; i < count; i++) {
    EmuArgument& a = list[i];
    a.reads = buffers[size_t(i)].reads;
    a.writes = buffers[size_t(i)].writes;
    a.unwritten = 0;
    if (a.kind == OUTPUT && !a.preset)
      for (auto& s : shadows[size_t(i)]) a.unwritten += s.write.thread == NOBODY;
  }
  statistics[0] = switches;
  statistics[1] = most_shared;
  return 0;
}

// Handlers for -fsanitize=...: a finding ends the launch like any other, with the body's line.
struct EmuPlace { const char* file; uint32_t line, column; };
#define EMU_HANDLER(name, text)                                                              \
  extern "C" __attribute__((noreturn, used)) void __ubsan_handle_##name##_abort(EmuPlace* p, \
                                                                               ...) {        \
    emu::fail("%s at %s:%u", text, p->file, p->line);                                        \
  }
EMU_HANDLER(out_of_bounds, "local array index out of bounds")
EMU_HANDLER(shift_out_of_bounds, "shift by too much")
EMU_HANDLER(add_overflow, "integer overflow in +")
EMU_HANDLER(sub_overflow, "integer overflow in -")
EMU_HANDLER(mul_overflow, "integer overflow in *")
EMU_HANDLER(negate_overflow, "integer overflow in negation")
EMU_HANDLER(divrem_overflow, "division by zero or overflow")
