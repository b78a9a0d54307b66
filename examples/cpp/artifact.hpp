// What `tpcompiler` wrote, read without Python: manifests, weights, and the package of compiled programs.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace serve {

using Json = nlohmann::json;
using Path = std::filesystem::path;
using Tensors = std::unordered_map<std::string, at::Tensor>;

Json read_json(const Path& path);
at::ScalarType dtype_of(const std::string& name);  // as a manifest spells it: f32, i64

// One program of the artifact, over weights and buffers that it shares with the others.
struct Program {
  Json manifest;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> model;
};

class Artifact {
 public:
  // Throws std::runtime_error: no package, or one that this process cannot run.
  explicit Artifact(const Path& directory);

  int64_t world_size() const;
  std::string device_type() const;
  const Json& groups() const;  // name -> lists of ranks

  // Maps the weights of a rank, and loads the models that it runs.
  std::map<std::string, Program> load(int rank, const at::Device& device) const;

 private:
  void refuse_elsewhere() const;

  Path directory_;
  Json compiled_;
  std::map<std::string, Path> folders_;    // of each program
  std::map<std::string, Json> manifests_;  // a lone program is called "model"
};

}  // namespace serve
