// The portable vocabulary on the CPU: the names that preludes/metal.h and preludes/cuda.h define.
#pragma once
#pragma GCC system_header
#include <cmath>

#include "half.h"
#include "machine.h"

#define thread_position_in_grid (emu::self->in_grid)
#define thread_position_in_threadgroup (emu::self->in_group)
#define thread_index_in_threadgroup (emu::self->id)
#define thread_index_in_simdgroup (emu::self->lane)
#define simdgroup_index_in_threadgroup (emu::self->simdgroup)
#define simdgroups_per_threadgroup (emu::group.simdgroups)
#define threadgroup_position_in_grid (emu::group.position)
#define threads_per_threadgroup (emu::group.size)
#define threadgroups_per_grid (emu::group.count)
#define threads_per_grid (emu::group.grid)

#define TS_FN inline
#define TS_THREAD
#define TS_UNROLL
#define TS_SHARED(T, name, n)                                                        \
  emu::Ptr<T> name {                                                                 \
    emu::shared_buffer(__LINE__, #name, (n), int(sizeof(T))), 0                      \
  }

#define ts_await() ((void)0)
#define ts_barrier() emu::barrier(emu::SCOPE_SHARED, __FILE__, __LINE__)
#define ts_barrier_device() \
  emu::barrier(emu::SCOPE_SHARED | emu::SCOPE_DEVICE, __FILE__, __LINE__)
#define ts_simd_barrier() ((void)emu::simd_of(emu::SYNC, 0, 0, __FILE__, __LINE__))
#define ts_simd_sum(v) emu::simd_of(emu::SUM, (v), 0, __FILE__, __LINE__)
#define ts_simd_max(v) emu::simd_of(emu::MAX, (v), 0, __FILE__, __LINE__)
#define ts_simd_min(v) emu::simd_of(emu::MIN, (v), 0, __FILE__, __LINE__)
#define ts_shuffle(v, lane) emu::simd_of(emu::SHUFFLE, (v), int(lane), __FILE__, __LINE__)
#define ts_shuffle_xor(v, mask) emu::simd_of(emu::XOR, (v), int(mask), __FILE__, __LINE__)
#define ts_shuffle_down(v, by) emu::simd_of(emu::DOWN, (v), int(by), __FILE__, __LINE__)

// Launches as phases of one.
#define TS_POOL(n) \
  emu::pool(n);    \
  TS_SHARED(int, ts_ticket_s, 2)
#define TS_PHASE(p) emu::phase(p)
#define TS_CARVED(T, name, n)                                                        \
  emu::Ptr<T> name {                                                                 \
    emu::shared_buffer(__LINE__, #name, (n), int(sizeof(T))), 0                      \
  }
#define ts_barrier_of(n) emu::barrier(emu::SCOPE_SHARED, __FILE__, __LINE__, (n))
inline int ts_take(emu::Ptr<int> count) { return emu::atomic_add(count, 1); }
inline void ts_signal(emu::Ptr<int> count, int n) { emu::atomic_add(count, n); }
inline void ts_wait_for(emu::Ptr<int> count, int need, int phase) {
  emu::wait_for(count, need, phase);
}

inline float ts_exp(float x) { return std::exp(x); }
inline float ts_fast_exp(float x) { return std::exp2(x * 1.44269504f); }
inline float ts_log(float x) { return std::log(x); }
inline float ts_sin(float x) { return std::sin(x); }
inline float ts_cos(float x) { return std::cos(x); }
inline float ts_tanh(float x) { return std::tanh(x); }
inline float ts_sqrt(float x) { return std::sqrt(x); }
inline float ts_rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float ts_fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float ts_abs(float x) { return std::fabs(x); }
inline float ts_min(float a, float b) { return b < a ? b : a; }
inline int ts_min(int a, int b) { return b < a ? b : a; }
inline uint ts_min(uint a, uint b) { return b < a ? b : a; }
inline float ts_max(float a, float b) { return b > a ? b : a; }
inline int ts_max(int a, int b) { return b > a ? b : a; }
inline uint ts_max(uint a, uint b) { return b > a ? b : a; }
inline float ts_as_float(uint u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint ts_as_uint(float f) { uint u; std::memcpy(&u, &f, 4); return u; }
inline uint ts_and_or(uint a, uint mask, uint bits) { return (a & mask) | bits; }

template <class T> uint2 ts_load_u32x2(emu::Ptr<T> p) {
  static_assert(sizeof(T) == 4 && std::is_integral<T>::value, "uint32 pointer wanted");
  struct alignas(8) Pair { uint x, y; };
  const Pair v = emu::load_vector<Pair>(p);
  return uint2{v.x, v.y};
}
template <class T> uint4 ts_load_u32x4(emu::Ptr<T> p) {
  static_assert(sizeof(T) == 4 && std::is_integral<T>::value, "uint32 pointer wanted");
  return emu::load_vector<uint4>(p);
}
template <class T> uint4 ts_stream_u32x4(emu::Ptr<T> p) { return ts_load_u32x4(p); }
template <class T> uint2 ts_stream_u32x2(emu::Ptr<T> p) { return ts_load_u32x2(p); }
template <class T> float4 ts_load_f32x4(emu::Ptr<T> p) {
  static_assert(std::is_same<typename std::remove_const<T>::type, float>::value, "float wanted");
  return emu::load_vector<float4>(p);
}
inline void ts_store_f32x4(emu::Ptr<float> p, float a, float b, float c, float d) {
  emu::store_vector(p, float4{a, b, c, d});
}
template <class T> void ts_load8(emu::Ptr<T> p, float* v) {
  typedef typename std::remove_const<T>::type V;
  struct alignas(16) Pack { V v[16 / sizeof(V)]; };
  const int n = 16 / sizeof(V);
  for (int at = 0; at < 8; at += n) {
    const Pack pack = emu::load_vector<Pack>(p + at);
    for (int i = 0; i < n; i++) v[at + i] = float(pack.v[i]);
  }
}
inline void ts_load8(emu::Ptr<const uint8_t> p, float* v) {
  struct alignas(8) Pack { uint8_t v[8]; };
  const Pack pack = emu::load_vector<Pack>(p);
  for (int i = 0; i < 8; i++) v[i] = ts_as_float(pack.v[i] == 0 ? 0x00400000u : pack.v[i] * (1u << 23));
}
template <class T> emu::Ptr<typename std::remove_const<T>::type> ts_writable(emu::Ptr<T> p) {
  return emu::Ptr<typename std::remove_const<T>::type>{p.b, p.offset};
}
template <class T> emu::Ptr<const T> ts_readable(emu::Ptr<T> p) { return p; }
inline uint3 ts_u3(int x, int y, int z) { return uint3{uint(x), uint(y), uint(z)}; }

template <class T> struct emu_is_bfloat { enum { value = std::is_same<T, emu_bfloat>::value }; };
#define ts_mma(T, d, a, b) \
  emu::simd_mma((d), (a), (b), bool(emu_is_bfloat<T>::value), __FILE__, __LINE__)
inline void emu_mma_top(float* d, const uint* a, const uint* b, const char* file, int line) {
  float all[4] = {d[0], d[1], 0.0f, 0.0f};
  const uint rows[4] = {a[0], 0u, a[1], 0u};
  emu::simd_mma(all, rows, b, false, file, line);
  d[0] = all[0];
  d[1] = all[1];
}
#define ts_mma_top(d, a, b) emu_mma_top((d), (a), (b), __FILE__, __LINE__)
template <class F> uint emu_h2(uint a, uint b, uint c, F f) {
  uint out = 0;
  for (int s = 0; s < 32; s += 16) {
    const double x = emu_half::decode(uint16_t(a >> s)), y = emu_half::decode(uint16_t(b >> s));
    out |= uint(emu_half(float(f(x, y, double(emu_half::decode(uint16_t(c >> s)))))).bits) << s;
  }
  return out;
}
inline uint ts_h2_add(uint a, uint b) {
  return emu_h2(a, b, 0, [](double x, double y, double) { return x + y; });
}
inline uint ts_h2_mul(uint a, uint b) {
  return emu_h2(a, b, 0, [](double x, double y, double) { return x * y; });
}
inline uint ts_h2_fma(uint a, uint b, uint c) {
  return emu_h2(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
template <class T> uint ts_pair(float x, float y) { return T(x).bits | uint(T(y).bits) << 16; }
template <class T> float emu_from_bits(uint bits) {
  T v;
  v.bits = uint16_t(bits & 0xffffu);
  return float(v);
}
template <class T> float ts_low(uint w) { return emu_from_bits<T>(w); }
template <class T> float ts_high(uint w) { return emu_from_bits<T>(w >> 16); }
inline void ts_store_u32x4(emu::Ptr<uint> p, uint a, uint b, uint c, uint d) {
  emu::store_vector(p, uint4{a, b, c, d});
}
