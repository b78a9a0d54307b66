#include "artifact.hpp"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

namespace serve {

namespace {

// A file in memory: read when it is used, and private to this process when it is written to.
std::shared_ptr<char> map_file(const Path& path, size_t& size) {
  const int file = open(path.c_str(), O_RDONLY);
  struct stat found {};
  if (file < 0 || fstat(file, &found) != 0) {
    throw std::runtime_error(path.string() + " cannot be read: " + std::strerror(errno));
  }
  size = static_cast<size_t>(found.st_size);
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  close(file);
  if (start == MAP_FAILED) {
    throw std::runtime_error(path.string() + " cannot be mapped: " + std::strerror(errno));
  }
  return {static_cast<char*>(start), [size](char* at) { munmap(at, size); }};
}

at::ScalarType stored_dtype(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16}, {"I64", at::kLong},
      {"I32", at::kInt},    {"I16", at::kShort}, {"I8", at::kChar},   {"U8", at::kByte},       {"BOOL", at::kBool},
      {"C64", at::kComplexFloat}, {"F8_E4M3", at::kFloat8_e4m3fn}, {"F8_E5M2", at::kFloat8_e5m2}};
  return known.at(name);
}

// The format: https://github.com/huggingface/safetensors
Tensors read_safetensors(const Path& path) {
  size_t size = 0;
  const auto data = map_file(path, size);
  uint64_t head = 0;
  if (size >= 8) {
    std::memcpy(&head, data.get(), 8);
  }
  if (size < 8 || head > size - 8) {
    throw std::runtime_error(path.string() + " is cut short");
  }
  Tensors found;
  const Json header = Json::parse(data.get() + 8, data.get() + 8 + head);
  for (const auto& [name, row] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    const auto shape = row.at("shape").get<std::vector<int64_t>>();
    const auto offsets = row.at("data_offsets").get<std::vector<size_t>>();
    if (offsets.at(1) > size - 8 - head) {
      throw std::runtime_error(path.string() + " is cut short");
    }
    char* at = data.get() + 8 + head + offsets[0];
    found[name] = at::from_blob(at, shape, [data](void*) {}, stored_dtype(row.at("dtype").get<std::string>()));
  }
  return found;
}

std::set<std::string> cpu_words() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, word;
  std::set<std::string> found;
  while (found.empty() && std::getline(file, line)) {
    if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) {
      std::istringstream words(line);
      while (words >> word) {
        found.insert(word);
      }
    }
  }
  return found;
}

}  // namespace

Json read_json(const Path& path) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error(path.string() + " cannot be read");
  }
  return Json::parse(file);
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"f64", at::kDouble}, {"f32", at::kFloat}, {"f16", at::kHalf}, {"bf16", at::kBFloat16}, {"i64", at::kLong},
      {"i32", at::kInt},    {"i16", at::kShort}, {"i8", at::kChar},  {"u8", at::kByte},       {"b8", at::kBool}};
  if (known.count(name) == 0) {
    throw std::runtime_error("this runner does not take tensors of " + name);
  }
  return known.at(name);
}

Artifact::Artifact(const Path& directory) : directory_(directory) {
  const Path set = directory / "programs.json";
  if (std::filesystem::exists(set)) {
    const Json listing = read_json(set);
    compiled_ = listing.value("compiled", Json::object());
    for (const auto& name : listing.at("programs").get<std::vector<std::string>>()) {
      folders_[name] = directory / name;
      manifests_[name] = read_json(directory / name / "manifest.json");
    }
  } else {
    folders_["model"] = directory;
    manifests_["model"] = read_json(directory / "manifest.json");
    compiled_ = manifests_["model"].value("compiled", Json::object());
  }
  if (compiled_.empty()) {
    throw std::runtime_error(directory.string() + " has no package: make one with tpcompiler package");
  }
  refuse_elsewhere();
}

void Artifact::refuse_elsewhere() const {
  if (compiled_.value("processes", 0) != 0) {
    throw std::runtime_error("the package is for processes that run several ranks each: package without --processes");
  }
  const auto torch = compiled_.at("torch").get<std::string>();
  if (torch.substr(0, torch.find('+')) != TORCH_VERSION) {
    throw std::runtime_error("the package is of torch " + torch + ", this is " TORCH_VERSION);
  }
  if (device_type() != "cpu") {
    return;  // a GPU that cannot run the code says so itself
  }
  const auto here = cpu_words();
  for (const auto& word : compiled_.at("capability").get<std::vector<std::string>>()) {
    if (here.count(word) == 0) {
      throw std::runtime_error("the package is for a CPU with " + word + ", which this one has not");
    }
  }
  at::set_num_threads(compiled_.at("threads").get<int>());
}

int64_t Artifact::world_size() const {
  int64_t size = 1;
  for (const auto& degree : manifests_.begin()->second.at("mesh")) {
    size *= degree.is_array() ? static_cast<int64_t>(degree.size()) : degree.get<int64_t>();  // or a list of shares
  }
  return size;
}

std::string Artifact::device_type() const {
  return compiled_.at("device_type").get<std::string>();
}

const Json& Artifact::groups() const {
  return manifests_.begin()->second.at("groups");
}

std::map<std::string, Program> Artifact::load(int rank, const at::Device& device) const {
  Tensors held;
  for (const auto& [name, manifest] : manifests_) {
    if (manifest.at("files").contains("rank_0.pt2")) {
      throw std::runtime_error("the weights are in the programs' files: convert the model with --layout shared");
    }
    const auto file = folders_.at(name) / ("rank_" + std::to_string(rank) + ".safetensors");
    for (const auto& [each, value] : read_safetensors(file)) {
      held[each] = value.to(device);
    }
  }
  std::map<std::string, Program> programs;
  for (const auto& [name, manifest] : manifests_) {
    Tensors own = held;
    for (const auto& row : manifest.at("tensors")) {
      if (row.contains("tied_to")) {
        own[row.at("name").get<std::string>()] = held.at(row.at("tied_to").get<std::string>());
      }
    }
    for (const auto& [model, ranks] : compiled_.at("models").at(name).items()) {
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
        continue;
      }
      auto loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
          (directory_ / "compiled.pt2").string(), model, true, 1, device.index());
      Tensors given;
      for (const auto& constant : loader->get_constant_fqns()) {
        const auto found = own.find(constant);
        if (found == own.end()) {
          throw std::runtime_error("the files of rank " + std::to_string(rank) + " lack the tensor " + constant);
        }
        auto value = found->second;
        if (const auto& strides = compiled_.at("strides"); strides.contains(constant)) {
          // Not as it lies in the file. (Of what a program writes all models must see one memory: kept in `held`.)
          auto laid = at::empty_strided(value.sizes(), strides.at(constant).get<std::vector<int64_t>>(), value.options());
          held[constant] = value = laid.copy_(value);
        }
        given.emplace(constant, value);
      }
      loader->load_constants(given, false, true, true);
      programs[name] = {manifest, std::move(loader)};
    }
  }
  return programs;
}

}  // namespace serve
