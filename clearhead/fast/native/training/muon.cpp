// Muon's update of matrices, one matrix at a time for each thread, so that its data stay in the second cache.
//
// Products are bfloat16, sums are float32. A matrix with more rows than columns is transposed. Source: K. Jordan et al.
// 2024, "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io).
//
// Legend: R the smaller and C the larger size of a matrix, both multiples of 32.

#include "../gemm/gemm.h"

#ifdef HAS_GEMM

namespace {

// Hand blocks of 16 x 16 numbers from make(row, column, block) to use(row, column, block). One of them has the order of
// the matrix, the other the order of R and C.
template <typename Make, typename Use>
void for_each_block(const MuonMatrix& matrix, const Make& make, const Use& use) {
  float block[TILE_WORDS], transposed[TILE_WORDS];
  const bool is_tall = matrix.rows > matrix.columns;
  for (int64_t row = 0; row < matrix.rows; row += TILE)
    for (int64_t column = 0; column < matrix.columns; column += TILE) {
      const int64_t r = is_tall ? column : row, c = is_tall ? row : column;
      make(row, column, r, c, block);
      if (is_tall) transpose_tile(reinterpret_cast<const uint32_t*>(block), TILE, reinterpret_cast<uint32_t*>(transposed));
      use(row, column, r, c, is_tall ? transposed : block);
    }
}

// Sums of a [M, K] b [K, N]; write(m, n, sums) gets 16 sums of a row.
template <typename Write>
void multiply_all(int64_t M, int64_t N, int64_t K, const uint16_t* a, const uint32_t* b, const Write& write) {
  alignas(64) float sums[BLOCK * BLOCK];
  const int64_t steps = K / BLOCK;
  for (int64_t n = 0; n < N; n += BLOCK)
    for (int64_t m = 0; m < M; m += BLOCK) {
      gemm(BLOCK, BLOCK, a + m * K, K, b + n / TILE * steps * TILE_WORDS, steps, steps, sums, BLOCK, false);
      for (int64_t j = 0; j < BLOCK; ++j)
        for (int64_t i = 0; i < BLOCK; i += WIDTH) write(m + j, n + i, load(sums + j * BLOCK + i));
    }
}

class Update {
 public:
  Update(const MuonCall& call, const MuonMatrix& matrix, Arena& arena)
      : call_(call), matrix_(matrix), R_(std::min(matrix.rows, matrix.columns)), C_(std::max(matrix.rows, matrix.columns)),
        x_(arena.take<uint16_t>(R_ * C_)), gram_(arena.take<uint16_t>(R_ * R_)),
        polynomial_(arena.take<uint16_t>(R_ * R_)), tiles_(arena.take<uint32_t>(R_ * C_ / 2)) {}

  void run() {
    read(1.0f / std::max(std::sqrt(advance()), 1e-7f));
    for (int64_t step = 0; step < call_.steps; ++step) iterate();
    write();
  }

 private:
  // Nesterov's momentum of 16 numbers.
  Vec<float> update(int64_t at) const {
    const Vec<float> momentum = load(matrix_.momentum + at), gradient = load(matrix_.gradient + at);
    return momentum + (gradient - momentum) * call_.share;
  }

  // Move the momentum towards the gradient, and return the sum of the squares of the update.
  float advance() const {
    Vec<float> squares = {};
    for (int64_t at = 0; at < R_ * C_; at += WIDTH) {
      store(matrix_.momentum + at, update(at));
      const Vec<float> vec = update(at);
      squares += vec * vec;
    }
    return reduce_add(squares);
  }

  void read(float scale) {
    for_each_block(
        matrix_,
        [&](int64_t row, int64_t column, int64_t, int64_t, float* block) {
          for (int64_t i = 0; i < TILE; ++i)
            store(block + i * TILE, update((row + i) * matrix_.columns + column) * scale);
        },
        [&](int64_t, int64_t, int64_t r, int64_t c, const float* block) {
          for (int64_t i = 0; i < TILE; ++i) store(x_ + (r + i) * C_ + c, load(block + i * TILE));
        });
  }

  void write() const {
    for_each_block(
        matrix_,
        [&](int64_t, int64_t, int64_t r, int64_t c, float* block) {
          for (int64_t i = 0; i < TILE; ++i) store(block + i * TILE, load(x_ + (r + i) * C_ + c));
        },
        [&](int64_t row, int64_t column, int64_t, int64_t, const float* block) {
          for (int64_t i = 0; i < TILE; ++i) {
            float* to = matrix_.parameter + (row + i) * matrix_.columns + column;
            store(to, load(to) * call_.kept - load(block + i * TILE) * matrix_.rate);
          }
        });
  }

  // x = a x + (b g + c g g) x, where g = x x^T.
  void iterate() {
    const float* factors = call_.factors;
    pack_transposed(x_, R_, C_, C_, tiles_);
    multiply_all(R_, R_, C_, x_, tiles_, [&](int64_t m, int64_t n, Vec<float> sums) { store(gram_ + m * R_ + n, sums); });
    pack_transposed(gram_, R_, R_, R_, tiles_);
    multiply_all(R_, R_, R_, gram_, tiles_, [&](int64_t m, int64_t n, Vec<float> sums) {
      store(polynomial_ + m * R_ + n, load(gram_ + m * R_ + n) * factors[1] + sums * factors[2]);
    });
    pack(x_, R_, C_, C_, tiles_);
    multiply_all(R_, C_, R_, polynomial_, tiles_, [&](int64_t m, int64_t n, Vec<float> sums) {
      store(x_ + m * C_ + n, load(x_ + m * C_ + n) * factors[0] + sums);
    });
  }

  const MuonCall& call_;
  const MuonMatrix& matrix_;
  const int64_t R_, C_;
  uint16_t *x_, *gram_, *polynomial_;
  uint32_t* tiles_;
};

}  // namespace

KERNEL void muon(const MuonCall* call, int64_t threads) {
  const Workspace workspace(threads);
#pragma omp parallel num_threads(int(threads))
  {
    Arena& arena = workspace[omp_get_thread_num()];
    const TileUse use;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < call->count; ++i) {
      const Arena::Frame frame(arena);
      Update(*call, call->matrices[i], arena).run();
    }
  }
}

#endif
