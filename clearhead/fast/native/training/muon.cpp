// Muon's update of matrices, one matrix at a time for a thread: what belongs to it stays in the second cache.
//
// Products are of bfloat16, sums are float32. A matrix with more rows than columns is turned. Source: K. Jordan et al.
// 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io).
//
// Legend: R the smaller and C the larger size of a matrix, both of them multiples of 32.

#include <cmath>

#include "calls.h"
#include "tiles.h"

#ifdef SQUARES

namespace {

struct Own {  // the memory of a thread
  Memory x, gram, polynomial, tiles;
};

// Hand 16 x 16 numbers at a time from make(row, column, block), in the order of the matrix, to use(row, column, block)
// in that of R and C, or the other way round.
template <typename Make, typename Use>
void for_each_block(const MuonMatrix& matrix, const Make& make, const Use& use) {
  float block[WORDS], turned[WORDS];
  const bool is_tall = matrix.rows > matrix.columns;
  for (long row = 0; row < matrix.rows; row += TILE)
    for (long column = 0; column < matrix.columns; column += TILE) {
      const long r = is_tall ? column : row, c = is_tall ? row : column;
      make(row, column, r, c, block);
      if (is_tall) turn_tile(reinterpret_cast<const uint32_t*>(block), TILE, reinterpret_cast<uint32_t*>(turned));
      use(row, column, r, c, is_tall ? turned : block);
    }
}

// Sums of a [M, K] b [K, N]; write(m, n, sums) gets 16 of a row.
template <typename Write>
void multiply_all(long M, long N, long K, const uint16_t* a, const uint32_t* b, const Write& write) {
  alignas(64) float sums[SIDE * SIDE];
  const long steps = K / SIDE;
  for (long n = 0; n < N; n += SIDE)
    for (long m = 0; m < M; m += SIDE) {
      multiply_square<BFloat16>(
          rows_of(a + m * K, K), SIDE, b + n / TILE * steps * WORDS, steps, steps, sums, SIDE, false);
      for (long j = 0; j < SIDE; ++j)
        for (long i = 0; i < SIDE; i += LANES) write(m + j, n + i, load_lanes(sums + j * SIDE + i));
    }
}

class Update {
 public:
  Update(const MuonCall& call, const MuonMatrix& matrix, Own& own)
      : call_(call), matrix_(matrix), R_(std::min(matrix.rows, matrix.columns)), C_(std::max(matrix.rows, matrix.columns)),
        x_(own.x.numbers<uint16_t>(R_ * C_)), gram_(own.gram.numbers<uint16_t>(R_ * R_)),
        polynomial_(own.polynomial.numbers<uint16_t>(R_ * R_)), tiles_(own.tiles.numbers<uint32_t>(R_ * C_ / 2)) {}

  void run() {
    read(1.0f / std::max(std::sqrt(advance()), 1e-7f));
    for (long step = 0; step < call_.steps; ++step) iterate();
    write();
  }

 private:
  // Nesterov's momentum, of 16 numbers.
  Floats update(long at) const {
    const Floats momentum = load_lanes(matrix_.momentum + at), gradient = load_lanes(matrix_.gradient + at);
    return momentum + (gradient - momentum) * call_.share;
  }

  // Move the momentum towards the gradient, and return the sum of the squares of the update.
  float advance() const {
    Floats squares = {};
    for (long at = 0; at < R_ * C_; at += LANES) {
      store_lanes(matrix_.momentum + at, update(at));
      const Floats lanes = update(at);
      squares += lanes * lanes;
    }
    return total(squares);
  }

  void read(float scale) {
    for_each_block(
        matrix_,
        [&](long row, long column, long, long, float* block) {
          for (long i = 0; i < TILE; ++i)
            store_lanes(block + i * TILE, update((row + i) * matrix_.columns + column) * scale);
        },
        [&](long, long, long r, long c, const float* block) {
          for (long i = 0; i < TILE; ++i) store_lanes(x_ + (r + i) * C_ + c, load_lanes(block + i * TILE));
        });
  }

  void write() const {
    for_each_block(
        matrix_,
        [&](long, long, long r, long c, float* block) {
          for (long i = 0; i < TILE; ++i) store_lanes(block + i * TILE, load_lanes(x_ + (r + i) * C_ + c));
        },
        [&](long row, long column, long, long, const float* block) {
          for (long i = 0; i < TILE; ++i) {
            float* to = matrix_.parameter + (row + i) * matrix_.columns + column;
            store_lanes(to, load_lanes(to) * call_.kept - load_lanes(block + i * TILE) * matrix_.rate);
          }
        });
  }

  // x = a x + (b g + c g g) x, where g = x x^T.
  void iterate() {
    const float* factors = call_.factors;
    tiles_of_rows(x_, R_, C_, C_, tiles_);
    multiply_all(R_, R_, C_, x_, tiles_, [&](long m, long n, Floats sums) { store_lanes(gram_ + m * R_ + n, sums); });
    tiles_of_rows(gram_, R_, R_, R_, tiles_);
    multiply_all(R_, R_, R_, gram_, tiles_, [&](long m, long n, Floats sums) {
      store_lanes(polynomial_ + m * R_ + n, load_lanes(gram_ + m * R_ + n) * factors[1] + sums * factors[2]);
    });
    tiles_of_columns(x_, R_, C_, C_, tiles_);
    multiply_all(R_, C_, R_, polynomial_, tiles_, [&](long m, long n, Floats sums) {
      store_lanes(x_ + m * C_ + n, load_lanes(x_ + m * C_ + n) * factors[0] + sums);
    });
  }

  const MuonCall& call_;
  const MuonMatrix& matrix_;
  const long R_, C_;
  uint16_t *x_, *gram_, *polynomial_;
  uint32_t* tiles_;
};

}  // namespace

#endif

extern "C" void muon(const MuonCall* call) {
#ifdef SQUARES
#pragma omp parallel
  {
    static thread_local Own own;
    const TileUse use;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < call->count; ++i) Update(*call, call->matrices[i], own).run();
  }
#endif
}
