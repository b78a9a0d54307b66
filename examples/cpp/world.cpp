#include "world.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>
#include <iostream>
#include <stdexcept>

namespace serve {

namespace {

constexpr std::chrono::minutes kWait{5};        // for the other ranks
constexpr std::chrono::hours kIdle{24 * 365};  // for a request

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw std::runtime_error(std::string(name) + " is not set: start with torchrun --no-python");
  }
  return value;
}

at::Device device_of(const std::string& type) {
  if (type == "cpu") {
    return {at::kCPU};
  }
#ifdef USE_C10D_NCCL
  const auto index = static_cast<c10::DeviceIndex>(std::stoi(environment("LOCAL_RANK")));
  c10::cuda::set_device(index);
  return {at::kCUDA, index};
#else
  throw std::runtime_error("the package is for CUDA, and this runner was built without");
#endif
}

}  // namespace

World::World(const Artifact& artifact)
    : rank_(std::stoi(environment("RANK"))), device_(device_of(artifact.device_type())) {
  const auto size = std::stoll(environment("WORLD_SIZE"));
  if (size != artifact.world_size()) {
    throw std::runtime_error(
        "the artifact is for " + std::to_string(artifact.world_size()) + " ranks, this world has " + std::to_string(size));
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(environment("MASTER_PORT")));
  const char* agents = std::getenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun's own is there already
  options.isServer = rank_ == 0 && !(agents != nullptr && std::string(agents) == "True");
  options.numWorkers = size;
  options.waitWorkers = false;
  options.timeout = kWait;
  auto meeting = c10::make_intrusive<c10d::TCPStore>(environment("MASTER_ADDR"), options);
  store_ = c10::make_intrusive<c10d::PrefixStore>("tpcompiler", meeting);
  for (const auto& [name, groups] : artifact.groups().items()) {
    for (const auto& ranks : groups.get<std::vector<std::vector<int>>>()) {
      if (std::find(ranks.begin(), ranks.end(), rank_) != ranks.end()) {
        make_group(name, ranks);
      }
    }
  }
}

void World::make_group(const std::string& name, const std::vector<int>& ranks) {
  const int own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  auto store = c10::make_intrusive<c10d::PrefixStore>(name + "/" + std::to_string(ranks.front()), store_);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, own, size);
  if (device_.is_cpu()) {
    auto options = c10d::ProcessGroupGloo::Options::create(kWait);
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, own, size, options);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::GLOO, backend);
    group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  } else {
#ifdef USE_C10D_NCCL
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, own, size);
    group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::NCCL, backend);
    group->setDefaultBackend(c10d::ProcessGroup::NCCL);
#endif
  }
  group->setGroupName(name);
  c10d::register_process_group(name, group);
  groups_.push_back(group);
  // What keeps ranks apart shows here, by the group's name, and not in the first request.
  std::vector<at::Tensor> ones = {at::ones({1}, at::TensorOptions().device(device_))};
  try {
    group->allreduce(ones)->wait();
  } catch (const std::exception& error) {
    throw std::runtime_error("the group " + name + " does not answer: " + error.what());
  }
  if (ones[0].item<float>() != static_cast<float>(size)) {
    throw std::runtime_error("the group " + name + " counts other ranks than its own");
  }
}

World::~World() {
  for (const auto& group : groups_) {
    c10d::unregister_process_group(group->getGroupName());
  }
}

bool World::next_line(std::string& line) {
  const std::string key = "line/" + std::to_string(lines_++);
  if (rank_ == 0) {
    const bool there = static_cast<bool>(std::getline(std::cin, line));
    const std::string said = there ? "+" + line : "-";
    store_->set(key, std::vector<uint8_t>(said.begin(), said.end()));
    return there;
  }
  store_->wait({key}, kIdle);
  const auto said = store_->get(key);
  line.assign(said.begin() + 1, said.end());
  return said.at(0) == '+';
}

}  // namespace serve
