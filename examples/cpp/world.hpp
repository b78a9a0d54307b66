// The processes of a world, as torchrun starts them: who this one is, and the groups that the programs name.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "artifact.hpp"

namespace serve {

class World {
 public:
  // Throws std::runtime_error: not started as torchrun does, another number of processes, or a group that is silent.
  explicit World(const Artifact& artifact);
  ~World();

  int rank() const { return rank_; }
  const at::Device& device() const { return device_; }

  // Gives every rank the lines that rank 0 reads, one by one; false when they end.
  bool next_line(std::string& line);

 private:
  void make_group(const std::string& name, const std::vector<int>& ranks);

  int rank_;
  at::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  size_t lines_ = 0;
};

}  // namespace serve
