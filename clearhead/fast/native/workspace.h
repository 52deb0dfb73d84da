// The memory of a call. A Workspace is reused, with its pages, from earlier calls that returned it. So there are as
// many as there were calls at the same time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

constexpr int64_t LINE = 64;  // bytes of a cache line

constexpr int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// Growing memory of one thread; its contents are undefined.
class alignas(LINE) Arena {
 public:
  // Memory that is taken during a frame is free again when the frame ends.
  class Frame {
   public:
    explicit Frame(Arena& arena) : arena_(arena), chunk_(arena.chunk_), used_(arena.used_) {}
    Frame(const Frame&) = delete;
    ~Frame() {
      arena_.chunk_ = chunk_, arena_.used_ = used_;
#ifdef __SANITIZE_ADDRESS__
      arena_.chunks_.erase(arena_.chunks_.begin() + chunk_, arena_.chunks_.end());
#endif
    }

   private:
    Arena& arena_;
    const size_t chunk_;
    const int64_t used_;
  };

  template <typename Number>
  Number* take(int64_t count) {
    const int64_t bytes = count * int64_t(sizeof(Number));
#ifdef __SANITIZE_ADDRESS__  // separate memory, whose end is watched
    chunks_.emplace_back(bytes);
    return reinterpret_cast<Number*>(chunks_[chunk_++].data.get());
#else
    while (chunk_ < chunks_.size() && used_ + bytes > chunks_[chunk_].size) ++chunk_, used_ = 0;
    if (chunk_ == chunks_.size()) chunks_.emplace_back(std::max(round_up(bytes, LINE), least_));
    auto* taken = reinterpret_cast<Number*>(chunks_[chunk_].data.get() + used_);
    used_ += round_up(bytes, LINE);
    return taken;
#endif
  }

  // After a call: join the chunks of memory into one for the next call.
  void join() {
    if (chunk_ > 0 || chunks_.size() > 1) {
      least_ = 0;
      for (const Chunk& chunk : chunks_) least_ += chunk.size;
      chunks_.clear();
    }
    chunk_ = 0, used_ = 0;
  }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };

  struct Chunk {
    explicit Chunk(int64_t bytes) : size(bytes) {
      void* taken = nullptr;
      if (posix_memalign(&taken, LINE, std::max(bytes, int64_t(1))) != 0) throw std::bad_alloc();
      data.reset(static_cast<uint8_t*>(taken));
    }
    int64_t size;
    std::unique_ptr<uint8_t, Free> data;
  };

  std::vector<Chunk> chunks_;
  size_t chunk_ = 0;  // chunk that memory is taken from
  int64_t used_ = 0;  // used bytes of the chunk
  int64_t least_ = 1 << 16;
};

class Workspace {
 public:
  explicit Workspace(int64_t threads) {
    const std::lock_guard<std::mutex> guard(list().mutex);
    if (!list().free.empty()) {
      arenas_ = std::move(list().free.back());
      list().free.pop_back();
    }
    while (int64_t(arenas_.size()) < threads) arenas_.push_back(std::make_unique<Arena>());
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    for (auto& arena : arenas_) arena->join();
    const std::lock_guard<std::mutex> guard(list().mutex);
    list().free.push_back(std::move(arenas_));
  }

  Arena& operator[](int64_t thread) const { return *arenas_[thread]; }

 private:
  using Arenas = std::vector<std::unique_ptr<Arena>>;
  struct List {
    std::mutex mutex;
    std::vector<Arenas> free;
  };

  // Workspaces of a library; never destroyed, since a call may outlive the end of the program.
  static List& list() {
    static List* const made = new List;
    return *made;
  }

  Arenas arenas_;
};
