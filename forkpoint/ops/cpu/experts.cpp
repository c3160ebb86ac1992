#include "experts.h"

#include "parallel.h"

namespace forkpoint {

namespace {

constexpr int64_t MAX_PAIRS = 168;  // (token, choice) pairs of one expert in one task

struct Piece {
  int64_t expert, first, last;  // of the pairs sorted by expert
};

template <class T>
void run(const Piece& p, const T* x, int64_t ldx, const PackedExpert& e, const int32_t* tokens, const int32_t* pairs,
         GateLimits limits, T* answers) {
  const int64_t rows = p.last - p.first, inner = e.down.k, hidden = e.down.n, into = e.gate_up.n;
  Buffer<T> gate_up(rows * into), active(rows * inner), y(rows * hidden);
  linear_serial<T>(x, ldx, tokens + p.first, e.gate_up, gate_up, into, rows);
  for (int64_t r = 0; r < rows; ++r) {
    const T *gate = gate_up + r * into, *up = gate + inner;
    for (int64_t i = 0; i < inner; i += LANES) {
      const int64_t left = inner - i;
      const vf first = load_n(gate + i, left);
      if (into == inner) {
        const vf positive = first > 0.0f ? first : vf{};
        store_n(active + r * inner + i, positive * positive, left);
        continue;
      }
      const vf most = vf{} + limits.gate, high = vf{} + limits.up;
      const vf second = load_n(up + i, left), capped = second > high ? high : second;
      store_n(active + r * inner + i, silu(first > most ? most : first) * (capped < -high ? -high : capped), left);
    }
  }
  linear_serial<T>(active, inner, nullptr, e.down, y, hidden, rows);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(answers + pairs[p.first + r] * hidden, y + r * hidden, size_t(hidden) * sizeof(T));
  }
}

}  // namespace

template <class T>
void experts(const T* x, int64_t ldx, const std::vector<PackedExpert>& packed, const float* weights, const int32_t* ids,
             int64_t top_k, GateLimits limits, T* out, int64_t tokens) {
  const int64_t total = tokens * top_k, hidden = packed[0].down.n;
  std::vector<int64_t> start(packed.size() + 1, 0);
  for (int64_t i = 0; i < total; ++i) ++start[size_t(ids[i]) + 1];
  for (size_t e = 0; e < packed.size(); ++e) start[e + 1] += start[e];
  std::vector<int32_t> pairs(static_cast<size_t>(total)), rows(static_cast<size_t>(total));
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < total; ++i) {
    const int64_t at = next[size_t(ids[i])]++;
    pairs[size_t(at)] = int32_t(i);
    rows[size_t(at)] = int32_t(i / top_k);
  }
  std::vector<Piece> pieces;
  for (size_t e = 0; e < packed.size(); ++e) {
    for (int64_t i = start[e]; i < start[e + 1]; i += MAX_PAIRS) {
      pieces.push_back({int64_t(e), i, std::min(start[e + 1], i + MAX_PAIRS)});
    }
  }
  Buffer<T> answers(total * hidden);
  T* shared = answers;
  parallel_tasks(int64_t(pieces.size()), [&](int64_t i) {
    const Piece& p = pieces[size_t(i)];
    run<T>(p, x, ldx, packed[size_t(p.expert)], rows.data(), pairs.data(), limits, shared);
  });
  // In the order of the routing, so that a token's bits do not depend on the batch.
  parallel_ranges(tokens, std::max<int64_t>(1, 32768 / (hidden * top_k)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < hidden; i += LANES) {
        vf sum = {};
        for (int64_t j = 0; j < top_k; ++j) {
          sum += weights[t * top_k + j] * load_n(shared + (t * top_k + j) * hidden + i, hidden - i);
        }
        store_n(out + t * hidden + i, sum, hidden - i);
      }
    }
  });
}

template void experts(const float*, int64_t, const std::vector<PackedExpert>&, const float*, const int32_t*, int64_t,
                      GateLimits, float*, int64_t);
template void experts(const bf16*, int64_t, const std::vector<PackedExpert>&, const float*, const int32_t*, int64_t,
                      GateLimits, bf16*, int64_t);

}  // namespace forkpoint
