// 16-bit floats on the CPU: conversions only, and only explicit ones, so that arithmetic that
// differs between CUDA and Metal does not compile.
#pragma once
#pragma GCC system_header
#include <cmath>
#include <cstdint>
#include <cstring>

struct emu_half {
  uint16_t bits;
  emu_half() = default;
  explicit emu_half(float f) : bits(encode(f)) {}
  explicit operator float() const { return decode(bits); }

  static float decode(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, m = h & 1023u;
    uint32_t u;
    if (exponent == 31) {
      u = sign | 0x7f800000u | (m << 13);
    } else if (exponent) {
      u = sign | ((exponent + 112u) << 23) | (m << 13);
    } else {
      const float tiny = std::ldexp(float(m), -24);
      std::memcpy(&u, &tiny, 4);
      u |= sign;
    }
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }

  static uint16_t encode(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    const uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (a >= 0x47800000u) return uint16_t(sign | 0x7c00u);
    if (a < 0x38800000u) {  // subnormal: the FPU rounds, ties to even
      float g;
      std::memcpy(&g, &a, 4);
      return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(g, 24))));
    }
    const uint32_t r = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
    return uint16_t(sign | (r > 0x7c00u ? 0x7c00u : r));
  }
};

struct emu_bfloat {
  uint16_t bits;
  emu_bfloat() = default;
  explicit emu_bfloat(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u)
      bits = uint16_t((u >> 16) | 64u);
    else
      bits = uint16_t((uint64_t(u) + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};

typedef emu_half float16_t;
typedef emu_bfloat bfloat16_t;
