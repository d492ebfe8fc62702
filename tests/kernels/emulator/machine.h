// What a kernel body compiled for the CPU sees of the machine: who it is, checked memory,
// barriers and simdgroup operations. The scheduler behind it is machine.cpp, compiled once.
#pragma once
#pragma GCC system_header
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __clang__
#define EMU_WRAPS __attribute__((no_sanitize("unsigned-integer-overflow")))
#else
#define EMU_WRAPS
#endif

typedef unsigned int uint;
struct uint2 { uint x, y; };
struct uint3 { uint x, y, z; };
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

namespace emu {

enum { SIMD = 32, SHARED_LIMIT = 32768, MAX_THREADS = 1024 };
enum Kind { INPUT = 0, OUTPUT = 1, SHARED = 2 };
enum Scope { SCOPE_SHARED = 1, SCOPE_DEVICE = 2 };
// Instead of a thread: nobody, several simdgroups, or (with the simdgroup added) several lanes.
static const uint32_t NOBODY = 0, SEVERAL = 0xffffffffu, LANES = 0x80000000u;

// Who last touched an element: thread + 1, threadgroup, barrier epoch, simdgroup epoch, and of a
// chain of launches the phase.
struct Access { uint32_t thread, group, epoch, simd_epoch; int phase; };
struct Shadow { Access write, read; };

struct Buffer {
  const char* name;
  unsigned char* data;
  int64_t size;     // elements
  Kind kind;
  Shadow* shadow;   // null for inputs
  bool preset;      // holds values before the launch
  int64_t reads, writes;
};

struct Thread {
  uint id, lane, simdgroup;
  uint3 in_group, in_grid;
  uint32_t* simd_epoch;
  int phase, awaited;  // of a chain of launches: the one this thread is in, and waited for
};

struct Group {
  uint3 position, size, count, grid;
  uint32_t linear, threads, simdgroups, shared_epoch, device_epoch;
};

extern Thread* self;
extern Group group;
extern Buffer* arguments;

__attribute__((noreturn, format(printf, 1, 2))) void fail(const char* format, ...);
Buffer* shared_buffer(int line, const char* name, int64_t count, int item);
// Of `threads`, those of the lowest numbers; of all if 0.
void barrier(int scope, const char* file, int line, int threads = 0);

enum Op { SUM = 1, MAX, MIN, SHUFFLE, XOR, DOWN, SYNC };
enum Type { FLOAT, INT, UINT };
uint32_t simd(int op, int type, uint32_t bits, int argument, const char* file, int line);
void simd_mma(float* c, const uint32_t* a, const uint32_t* b, bool bfloat, const char* file,
              int line);

// --- memory checks ----------------------------------------------------------------------------

static inline uint32_t epoch_of(Kind kind) {
  return kind == SHARED ? group.shared_epoch : group.device_epoch;
}

// The simdgroup of the accesses recorded in `a`.
static inline uint32_t simdgroup_of(const Access& a) {
  return a.thread & LANES ? a.thread & ~LANES : (a.thread - 1) / SIMD;
}

// Whether access `a` happened before anything this thread does now.
static inline bool ordered(const Access& a, Kind kind) {
  if (a.thread == self->id + 1 && a.group == group.linear) return true;
  if (kind == OUTPUT && a.group != group.linear) return false;  // groups are never ordered
  if (a.epoch != epoch_of(kind)) return true;
  return a.thread != SEVERAL && simdgroup_of(a) == self->simdgroup &&
         a.simd_epoch != *self->simd_epoch;
}

static inline void in_bounds(const Buffer& b, int64_t i, int64_t count, const char* what) {
  if (i < 0 || i + count > b.size)
    fail("%s out of bounds: %s[%lld]%s, %s holds %lld elements", what, b.name, (long long)i,
         count > 1 ? " (vector)" : "", b.name, (long long)b.size);
}

static inline void on_read(Buffer& b, int64_t i) {
  b.reads++;
  if (b.kind == INPUT) return;
  Shadow& s = b.shadow[i];
  if (s.write.thread == NOBODY && !b.preset)
    fail("read of unwritten %s[%lld]", b.name, (long long)i);
  if (b.kind == OUTPUT && s.write.phase > self->awaited && s.write.phase != self->phase)
    fail("read of %s[%lld] before ts_await", b.name, (long long)i);
  if (s.write.thread != NOBODY && !ordered(s.write, b.kind))
    fail("race: read of %s[%lld], written by thread %u with no barrier between", b.name,
         (long long)i, s.write.thread - 1);
  const uint32_t me = self->id + 1, epoch = epoch_of(b.kind);
  const bool others = s.read.thread != NOBODY && s.read.group == group.linear &&
                      s.read.epoch == epoch && s.read.thread != me;
  uint32_t who = me;
  if (others && (s.read.thread == SEVERAL || simdgroup_of(s.read) != self->simdgroup))
    who = SEVERAL;
  else if (others && s.read.simd_epoch == *self->simd_epoch)
    who = LANES | self->simdgroup;
  s.read = Access{who, group.linear, epoch, *self->simd_epoch, self->phase};
}

static inline void on_write(Buffer& b, int64_t i) {
  b.writes++;
  if (b.kind == INPUT) fail("write to %s[%lld], an input", b.name, (long long)i);
  Shadow& s = b.shadow[i];
  if (s.write.thread != NOBODY && !ordered(s.write, b.kind))
    fail("race: write to %s[%lld], also written by thread %u with no barrier between", b.name,
         (long long)i, s.write.thread - 1);
  if (s.read.thread != NOBODY && !ordered(s.read, b.kind)) {
    if (s.read.thread & LANES)
      fail("race: write to %s[%lld], read by several threads with no barrier between", b.name,
           (long long)i);
    fail("race: write to %s[%lld], read by thread %u with no barrier between", b.name,
         (long long)i, s.read.thread - 1);
  }
  s.write = Access{self->id + 1, group.linear, epoch_of(b.kind), *self->simd_epoch,
                   self->phase};
}

template <class T>
struct Ref {
  Buffer* b;
  int64_t i;
  Ref(Buffer* buffer, int64_t index) : b(buffer), i(index) {}
  Ref(const Ref&) = default;
  T get() const {
    in_bounds(*b, i, 1, "read");
    on_read(*b, i);
    T v;
    std::memcpy(&v, b->data + i * sizeof(T), sizeof(T));
    return v;
  }
  const Ref& set(T v) const {
    in_bounds(*b, i, 1, "write");
    on_write(*b, i);
    std::memcpy(b->data + i * sizeof(T), &v, sizeof(T));
    return *this;
  }
  operator T() const { return get(); }
  template <class U, class = typename std::enable_if<std::is_class<T>::value &&
                                                     std::is_arithmetic<U>::value>::type>
  explicit operator U() const { return U(get()); }
  const Ref& operator=(T v) const { return set(v); }
  const Ref& operator=(const Ref& o) const { return set(o.get()); }
  const Ref& operator+=(T v) const { return set(get() + v); }
  const Ref& operator-=(T v) const { return set(get() - v); }
  const Ref& operator*=(T v) const { return set(get() * v); }
};

// A pointer into a Buffer. T may be const: elements then come by value.
template <class T>
struct Ptr {
  typedef typename std::remove_const<T>::type V;
  Buffer* b;
  int64_t offset;
  template <class I, class Q = T>
  typename std::enable_if<std::is_const<Q>::value, V>::type operator[](I k) const {
    static_assert(std::is_integral<I>::value, "index with an integer");
    return Ref<V>(b, offset + int64_t(k)).get();
  }
  template <class I, class Q = T>
  typename std::enable_if<!std::is_const<Q>::value, Ref<V>>::type operator[](I k) const {
    static_assert(std::is_integral<I>::value, "index with an integer");
    return Ref<V>(b, offset + int64_t(k));
  }
  auto operator*() const -> decltype((*this)[0]) { return (*this)[0]; }
  template <class I> Ptr operator+(I k) const { return Ptr{b, offset + int64_t(k)}; }
  template <class I> Ptr operator-(I k) const { return Ptr{b, offset - int64_t(k)}; }
  template <class I> Ptr& operator+=(I k) { offset += int64_t(k); return *this; }
  Ptr& operator++() { offset++; return *this; }
  operator Ptr<const V>() const { return Ptr<const V>{b, offset}; }
};

// `bytes` at p as one vector access.
template <class Vector, class T>
Vector load_vector(Ptr<T> p) {
  const int64_t count = sizeof(Vector) / sizeof(T);
  in_bounds(*p.b, p.offset, count, "vector read");
  if (p.offset * sizeof(T) % sizeof(Vector))
    fail("misaligned %d-byte load at %s[%lld]", int(sizeof(Vector)), p.b->name,
         (long long)p.offset);
  for (int64_t k = 0; k < count; k++) on_read(*p.b, p.offset + k);
  Vector v;
  std::memcpy(&v, p.b->data + p.offset * sizeof(T), sizeof v);
  return v;
}

template <class Vector, class T>
void store_vector(Ptr<T> p, Vector v) {
  const int64_t count = sizeof(Vector) / sizeof(T);
  in_bounds(*p.b, p.offset, count, "vector write");
  if (p.offset * sizeof(T) % sizeof(Vector))
    fail("misaligned %d-byte store at %s[%lld]", int(sizeof(Vector)), p.b->name,
         (long long)p.offset);
  for (int64_t k = 0; k < count; k++) on_write(*p.b, p.offset + k);
  std::memcpy(p.b->data + p.offset * sizeof(T), &v, sizeof v);
}

// --- launches as phases of one ----------------------------------------------------------------

// What each phase may carve, in bytes.
void pool(int64_t bytes);

// The first phase awaits nothing.
void phase(int p);

// Not a data race, so no shadow.
static inline int* counter(Ptr<int> p) {
  in_bounds(*p.b, p.offset, 1, "counter");
  return reinterpret_cast<int*>(p.b->data) + p.offset;
}
static inline int atomic_add(Ptr<int> p, int n) {
  int* at = counter(p);
  *at += n;
  return *at - n;
}
// Lets every other thread run that can.
void after_others();
static inline void wait_for(Ptr<int> p, int need, int phase) {
  for (int turn = 0; turn < MAX_THREADS && *counter(p) < need; turn++) after_others();
  if (*counter(p) < need)
    fail("waits for ever: %s[%lld] is %d of %d", p.b->name, (long long)p.offset, *counter(p), need);
  if (*counter(p) > need)
    fail("waits for %d of %d: %s[%lld]", need, *counter(p), p.b->name, (long long)p.offset);
  if (phase > self->awaited) self->awaited = phase;
}

template <class T> struct TypeOf;
template <> struct TypeOf<float> { enum { value = FLOAT }; };
template <> struct TypeOf<int> { enum { value = INT }; };
template <> struct TypeOf<uint> { enum { value = UINT }; };

template <class T>
T simd_of(int op, T v, int argument, const char* file, int line) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits = simd(op, TypeOf<T>::value, bits, argument, file, line);
  std::memcpy(&v, &bits, 4);
  return v;
}
template <class T>
T simd_of(int op, const Ref<T>& v, int argument, const char* file, int line) {
  return simd_of(op, v.get(), argument, file, line);
}

}  // namespace emu

// One argument of a launch, as the harness passes it.
struct EmuArgument {
  const char* name;
  void* data;
  int64_t size;
  int32_t item, kind, preset, padding;
  int64_t reads, writes, unwritten;
};
