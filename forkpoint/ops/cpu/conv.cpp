#include "conv.h"

#include <cstring>
#include <vector>

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t ROWS = 32;  // tokens of one task

// Sixteen channels of one token, the first `left` of them where that is fewer.
template <class T, class Load, class Store>
void lane_group(const Conv<T>& c, const T* const* input, int64_t d, const Load& read, const Store& write) {
  vf sum = c.bias ? read(c.bias + d) : (vf){};
  for (int64_t j = 0; j < c.width; ++j) {
    if (input[j]) sum += read(c.taps + j * c.dim + d) * read(input[j] + d);
  }
  write(c.silu ? silu(sum) : sum);
}

// One token from its W inputs; input[j] may be null, which is zero.
template <class T>
void taps(const Conv<T>& c, const T* const* input, T* out) {
  int64_t d = 0;
  for (; d + LANES <= c.dim; d += LANES) {
    lane_group(c, input, d, [](const auto* p) { return load(p); }, [&](vf v) { store(out + d, v); });
  }
  const int64_t left = c.dim - d;
  if (left == 0) return;
  lane_group(
      c, input, d, [&](const auto* p) { return load_part(p, left); }, [&](vf v) { store_part(out + d, v, left); });
}

template <class T>
const T* window_row(const Conv<T>& c, int32_t slot, int64_t row) {
  return slot < 0 ? nullptr : c.pool + slot * c.pool_stride + row * c.dim;
}

// The input at position p of a segment that starts at x row `begin`; before it, the window of `src`.
template <class T>
const T* input_at(const Conv<T>& c, int64_t begin, int32_t src, int64_t p) {
  return p >= 0 ? c.x + (begin + p) * c.x_stride : window_row(c, src, c.width - 1 + p);
}

// The window whose row j is input(j), which may be null.
template <class T, class Input>
void store_inputs(const Conv<T>& c, int32_t dst, const Input& input) {
  if (dst < 0) return;
  T* target = c.pool + dst * c.pool_stride;
  // In place only row j + length moves to row j: ascending order reads each row before it is overwritten.
  for (int64_t j = 0; j < c.width - 1; ++j) {
    const T* source = input(j);
    if (source) {
      std::memmove(target + j * c.dim, source, size_t(c.dim) * sizeof(T));
    } else {
      std::memset(target + j * c.dim, 0, size_t(c.dim) * sizeof(T));
    }
  }
}

template <class T>
void store_window(const Conv<T>& c, int64_t begin, int32_t src, int64_t length, int32_t dst) {
  store_inputs(c, dst, [&](int64_t j) { return input_at(c, begin, src, length - (c.width - 1) + j); });
}

// The input at position p of a row with drafts; before it, what is pending, and before that the window of its slot.
template <class T>
const T* pending_at(const Conv<T>& c, const InputRecords<T>& r, const VerifyRows& w, int64_t row, int64_t p) {
  if (p >= 0) return c.x + (w.cu_tokens[row] + p) * c.x_stride;
  const int64_t record = p + w.pending[row];
  if (record < 0) return window_row(c, w.src[row], c.width - 1 + record);
  return r.data + (w.read[row] * r.length + record) * c.dim;
}

// The windows after `length` of the row's tokens, and at the mark.
template <class T>
void store_folded(const Conv<T>& c, const InputRecords<T>& r, const VerifyRows& w, int64_t row, int64_t length) {
  const auto window = [&](int64_t end, int32_t dst) {
    store_inputs(c, dst, [&](int64_t j) { return pending_at(c, r, w, row, end - (c.width - 1) + j); });
  };
  const bool marks_source = w.mark_dst[row] == w.src[row];  // which has to be read first
  if (marks_source) window(length, w.dst[row]);
  // Beyond what is pending, where drafts were missed, there is nothing to be read.
  if (w.mark[row] && w.mark[row] <= w.pending[row]) window(w.mark[row] - w.pending[row], w.mark_dst[row]);
  if (!marks_source) window(length, w.dst[row]);
}

}  // namespace

template <class T>
void conv_prefill(const Conv<T>& c, const Segments& s) {
  struct Piece {
    int64_t segment, first, last;
  };
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < s.count; ++n) {
    const int64_t length = s.cu_seqlens[n + 1] - s.cu_seqlens[n];
    for (int64_t t = 0; t < length; t += ROWS) pieces.push_back({n, t, std::min(length, t + ROWS)});
  }
  parallel_tasks(int64_t(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[size_t(i)];
    const int64_t begin = s.cu_seqlens[piece.segment];
    for (int64_t t = piece.first; t < piece.last; ++t) {
      const T* input[MAX_TAPS];
      for (int64_t j = 0; j < c.width; ++j) {
        input[j] = input_at(c, begin, s.src[piece.segment], t - (c.width - 1) + j);
      }
      taps(c, input, c.out + (begin + t) * c.dim);
    }
  });
  // After every read of a source window: a segment's own slot may be both source and target.
  for (int64_t n = 0; n < s.count; ++n) {
    const int64_t begin = s.cu_seqlens[n], length = s.cu_seqlens[n + 1] - begin;
    for (int64_t e = s.save_ptr[n]; e < s.save_ptr[n + 1]; ++e) {
      store_window(c, begin, s.src[n], s.save_pos[e], s.save_dst[e]);
    }
    store_window(c, begin, s.src[n], length, s.dst[n]);
  }
}

template <class T>
void conv_update(const Conv<T>& c, int64_t rows, const int32_t* src, const int32_t* dst) {
  parallel_ranges(rows, std::max<int64_t>(1, 16384 / c.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* input[MAX_TAPS];
      for (int64_t j = 0; j < c.width; ++j) input[j] = input_at(c, row, src[row], j - (c.width - 1));
      taps(c, input, c.out + row * c.dim);
      store_window(c, row, src[row], 1, dst[row]);
    }
  });
}

template <class T>
void conv_fold(const Conv<T>& c, const InputRecords<T>& r, const VerifyRows& w) {
  for (int64_t row = 0; row < w.count; ++row) store_folded(c, r, w, row, 0);
}

template <class T>
void conv_verify(const Conv<T>& c, const InputRecords<T>& r, const VerifyRows& w) {
  parallel_ranges(w.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = w.cu_tokens[row], length = w.cu_tokens[row + 1] - first;
      for (int64_t t = 0; t < length; ++t) {
        const T* input[MAX_TAPS];
        for (int64_t j = 0; j < c.width; ++j) input[j] = pending_at(c, r, w, row, t - (c.width - 1) + j);
        taps(c, input, c.out + (first + t) * c.dim);
      }
      store_folded(c, r, w, row, length == 1 ? 1 : 0);
      for (int64_t t = 0; t < length; ++t) {  // the line written may be the one read
        const T* input = c.x + (first + t) * c.x_stride;
        std::memcpy(r.data + (w.write[row] * r.length + t) * c.dim, input, size_t(c.dim) * sizeof(T));
      }
    }
  });
}

#define FORKPOINT_CONV(T)                                          \
  template void conv_prefill(const Conv<T>&, const Segments&);     \
  template void conv_update(const Conv<T>&, int64_t, const int32_t*, const int32_t*);                 \
  template void conv_verify(const Conv<T>&, const InputRecords<T>&, const VerifyRows&); \
  template void conv_fold(const Conv<T>&, const InputRecords<T>&, const VerifyRows&);
FORKPOINT_CONV(float)
FORKPOINT_CONV(bf16)

}  // namespace forkpoint
