// The portable vocabulary for mx.fast.metal_kernel. The thread attributes
// (thread_position_in_grid, ...) need no definition: MLX declares each one whose name stands in
// the kernel body.
#ifdef TS_MSL_STUB  // clang cannot give a local variable an address space, Metal can
#define TS_SHARED(T, name, n) static threadgroup T name[n]
#else
#define TS_SHARED(T, name, n) threadgroup T name[n]
#endif
#define TS_FN inline
#define TS_THREAD thread
#define TS_UNROLL _Pragma("clang loop unroll(full)")

// Where a body has its weights at hand and goes on to what other launches computed.
#define ts_await() ((void)0)
#define ts_barrier() threadgroup_barrier(mem_flags::mem_threadgroup)
#define ts_barrier_device() \
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define ts_simd_barrier() simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)
#define ts_simd_sum(v) metal::simd_sum(v)
#define ts_simd_max(v) metal::simd_max(v)
#define ts_simd_min(v) metal::simd_min(v)
#define ts_shuffle(v, l) metal::simd_shuffle((v), ushort(l))
#define ts_shuffle_xor(v, m) metal::simd_shuffle_xor((v), ushort(m))
#define ts_shuffle_down(v, d) metal::simd_shuffle_down((v), ushort(d))

TS_FN float ts_exp(float x) { return metal::precise::exp(x); }
TS_FN float ts_fast_exp(float x) { return metal::fast::exp(x); }
TS_FN float ts_log(float x) { return metal::precise::log(x); }
TS_FN float ts_sin(float x) { return metal::precise::sin(x); }
TS_FN float ts_cos(float x) { return metal::precise::cos(x); }
TS_FN float ts_tanh(float x) { return metal::precise::tanh(x); }
TS_FN float ts_sqrt(float x) { return metal::precise::sqrt(x); }
TS_FN float ts_rsqrt(float x) { return metal::precise::rsqrt(x); }
TS_FN float ts_fma(float a, float b, float c) { return metal::fma(a, b, c); }
TS_FN float ts_abs(float x) { return metal::abs(x); }
TS_FN float ts_min(float a, float b) { return b < a ? b : a; }
TS_FN int ts_min(int a, int b) { return b < a ? b : a; }
TS_FN uint ts_min(uint a, uint b) { return b < a ? b : a; }
TS_FN float ts_max(float a, float b) { return b > a ? b : a; }
TS_FN int ts_max(int a, int b) { return b > a ? b : a; }
TS_FN uint ts_max(uint a, uint b) { return b > a ? b : a; }
TS_FN float ts_as_float(uint u) { return as_type<float>(u); }
TS_FN uint ts_as_uint(float f) { return as_type<uint>(f); }

TS_FN uint ts_and_or(uint a, uint mask, uint bits) { return (a & mask) | bits; }

// 8- and 16-byte accesses; pointers must be aligned to them.
TS_FN uint2 ts_load_u32x2(const device uint* p) { return *(const device uint2*)p; }
TS_FN uint4 ts_load_u32x4(const device uint* p) { return *(const device uint4*)p; }
TS_FN uint4 ts_load_u32x4(const threadgroup uint* p) { return *(const threadgroup uint4*)p; }
TS_FN float4 ts_load_f32x4(const device float* p) { return *(const device float4*)p; }
TS_FN float4 ts_load_f32x4(const threadgroup float* p) { return *(const threadgroup float4*)p; }
TS_FN void ts_store_f32x4(threadgroup float* p, float a, float b, float c, float d) {
  p[0] = a; p[1] = b; p[2] = c; p[3] = d;
}
TS_FN uint4 ts_stream_u32x4(const device uint* p) { return *(const device uint4*)p; }
TS_FN uint2 ts_stream_u32x2(const device uint* p) { return *(const device uint2*)p; }
// Eight values as float.
TS_FN void ts_load8(const device float* p, thread float* v) {
  const float4 a = ts_load_f32x4(p), b = ts_load_f32x4(p + 4);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
TS_FN void ts_load8(const device bfloat16_t* p, thread float* v) {
  const uint4 u = *(const device uint4*)p;
  const uint w[4] = {u.x, u.y, u.z, u.w};
  TS_UNROLL for (int i = 0; i < 4; i++) {
    v[2 * i] = as_type<float>(w[i] << 16);
    v[2 * i + 1] = as_type<float>(w[i] & 0xffff0000u);
  }
}
TS_FN void ts_load8(const device half* p, thread float* v) {
  TS_UNROLL for (int i = 0; i < 8; i++) v[i] = float(p[i]);
}
// Eight stored scales: bytes are powers of two with bias 127.
TS_FN void ts_load8(const device uint8_t* p, thread float* v) {
  TS_UNROLL for (int i = 0; i < 8; i++)
    v[i] = as_type<float>(p[i] == 0 ? 0x00400000u : uint(p[i]) << 23);
}
// A pointer for writing into an input that the kernel declares as updated in place.
template <typename T> TS_FN device T* ts_writable(const device T* p) { return (device T*)p; }

// D += A B: A [16, 16] and B [16, 8] of T, D [16, 8] float, all in registers.
// Lane 4 g + t holds, as pairs of neighbouring k: a = rows g, g + 8 at k 2t, then at k 2t + 8;
// b = column g at k 2t, then 2t + 8; d = row g at columns 2t, 2t + 1, then row g + 8.
// Written with shuffles: Apple's matrix unit keeps its tiles in another order, and kernels built on
// this are meant for CUDA. Slow, and right.
template <typename T> TS_FN float ts_low(uint w);
template <typename T> TS_FN float ts_high(uint w);
template <> TS_FN float ts_low<bfloat16_t>(uint w) { return as_type<float>(w << 16); }
template <> TS_FN float ts_high<bfloat16_t>(uint w) { return as_type<float>(w & 0xffff0000u); }
template <> TS_FN float ts_low<half>(uint w) { return float(as_type<half>(ushort(w & 0xffffu))); }
template <> TS_FN float ts_high<half>(uint w) { return float(as_type<half>(ushort(w >> 16))); }
template <typename T>
TS_FN void ts_mma_slowly(thread float* d, thread const uint* a, thread const uint* b, uint lane) {
  for (uint k = 0; k < 4; k++) {
    for (uint h = 0; h < 2; h++) {
      const uint top = metal::simd_shuffle(a[2 * h], ushort(lane / 4 * 4 + k));
      const uint bottom = metal::simd_shuffle(a[2 * h + 1], ushort(lane / 4 * 4 + k));
      for (uint n = 0; n < 2; n++) {
        const uint x = metal::simd_shuffle(b[h], ushort((lane % 4 * 2 + n) * 4 + k));
        d[n] += ts_low<T>(top) * ts_low<T>(x) + ts_high<T>(top) * ts_high<T>(x);
        d[2 + n] += ts_low<T>(bottom) * ts_low<T>(x) + ts_high<T>(bottom) * ts_high<T>(x);
      }
    }
  }
}
#define ts_mma(T, d, a, b) ts_mma_slowly<T>(d, a, b, lane)

// The same for 8 rows of A: a = row g at k 2t, then at k 2t + 8; d = row g at columns 2t, 2t + 1.
TS_FN void ts_mma_top_run(thread float* d, thread const uint* a, thread const uint* b, uint lane) {
  float all[4] = {d[0], d[1], 0.0f, 0.0f};
  const uint rows[4] = {a[0], 0u, a[1], 0u};
  ts_mma_slowly<half>(all, rows, b, lane);
  d[0] = all[0];
  d[1] = all[1];
}
#define ts_mma_top(d, a, b) ts_mma_top_run(d, a, b, lane)

// Two halves in a word, side by side.
TS_FN uint ts_h2_add(uint a, uint b) { return as_type<uint>(as_type<half2>(a) + as_type<half2>(b)); }
TS_FN uint ts_h2_mul(uint a, uint b) { return as_type<uint>(as_type<half2>(a) * as_type<half2>(b)); }
TS_FN uint ts_h2_fma(uint a, uint b, uint c) {
  return as_type<uint>(metal::fma(as_type<half2>(a), as_type<half2>(b), as_type<half2>(c)));
}

// Two floats rounded to T, the first in the low half.
template <typename T> TS_FN uint ts_pair(float x, float y);
template <> TS_FN uint ts_pair<bfloat16_t>(float x, float y) {
  return uint(as_type<ushort>(bfloat16_t(x))) | uint(as_type<ushort>(bfloat16_t(y))) << 16;
}
template <> TS_FN uint ts_pair<half>(float x, float y) {
  return uint(as_type<ushort>(half(x))) | uint(as_type<ushort>(half(y))) << 16;
}
TS_FN void ts_store_u32x4(threadgroup uint* p, uint a, uint b, uint c, uint d) {
  p[0] = a; p[1] = b; p[2] = c; p[3] = d;
}
