"""What is left out of a kernel's text, and what must not be."""

import pytest

from turbospark.kernels.shorten import bare, shortened

DEFINITIONS = """
// a comment
typedef unsigned int uint;
#define TS_FN inline
#define ts_long(a) \\
  ts_used(a, 1)
#ifdef SOMETHING
#define TS_EITHER 1
#else
#define TS_EITHER 2
#endif
template <typename T> struct ts_kind;
template <>
struct ts_kind<int> {
  static int of(int a) { return a; }
};
TS_FN int ts_used(int a) { return ts_deeper(a); }
TS_FN int ts_used(int a, int b) { return a - -b; }
TS_FN int ts_deeper(int a) {
  if (a) { return 1; }
  return ts_kind<int>::of(a);
}
TS_FN int ts_unused(int a) { return a; }
"""


def test_a_text_keeps_what_its_body_reaches_and_nothing_else() -> None:
    header, body = shortened(DEFINITIONS, "  y[0] = ts_used(x[0]);  // why\n\n  TS_FN int i;\n")
    assert body == "y[0]=ts_used(x[0]);\nTS_FN int i;\n"
    assert [
        word in header for word in ("ts_deeper(", "ts_kind<int>", "int b){return a - -b;}")
    ] == [True] * 3
    assert header.index("struct ts_kind") < header.index("ts_deeper(int a)")
    assert header.startswith("typedef unsigned int uint;\n#define TS_FN inline\n#ifdef SOMETHING\n")
    assert not any(word in header for word in ("ts_unused", "ts_long", "comment"))


def test_an_unused_definition_is_left_out_whole() -> None:
    header, _ = shortened(DEFINITIONS, "ts_unused(1);")
    assert "ts_deeper" not in header
    assert "ts_kind" not in header
    assert header.endswith("TS_FN int ts_unused(int a){return a;}\n")


def test_macros_bring_what_they_call() -> None:
    header, _ = shortened(DEFINITIONS, "ts_long(2);")
    assert "#define ts_long(a) \\\nts_used(a,1)\n" in header
    assert "ts_deeper" in header


def test_strings_and_signs_keep_their_spaces() -> None:
    assert (
        bare('  asm("add , b" : "=r"(v) );\n a = b - -c;')
        == 'asm("add , b" : "=r"(v) );\na=b - -c;\n'
    )


def test_a_definition_that_does_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end: TS_FN int ts_half"):
        shortened("TS_FN int ts_half(int a) {\n", "ts_half(1);")
