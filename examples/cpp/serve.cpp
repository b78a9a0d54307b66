// A rank of a service: torchrun --nproc-per-node N --no-python serve OUT
//
// Rank 0 reads requests from standard input, one JSON object a line, and writes an answer a line:
//   {"program": "decode", "inputs": {"input_ids": [[5]], "cache_position": [3]}, "argmax": true}
//   {"logits": [[17]]}
// A lone program has no name. "argmax" gives the index of the largest number of the last dim in place of the numbers.
// A request that does not fit is answered by {"error": "..."}, before any rank has begun with it.

#include <c10/core/InferenceMode.h>

#include <iostream>

#include "artifact.hpp"
#include "world.hpp"

namespace {

using serve::Json;

// The leaves of nested lists in order, and their shape.
void flatten(const Json& value, size_t depth, std::vector<int64_t>& shape, std::vector<double>& numbers) {
  if (!value.is_array()) {
    if (depth != shape.size() || !(value.is_number() || value.is_boolean())) {
      throw std::runtime_error("is no array of numbers of one shape");
    }
    numbers.push_back(value.is_boolean() ? value.get<bool>() : value.get<double>());
    return;
  }
  const auto size = static_cast<int64_t>(value.size());
  if (depth == shape.size() && numbers.empty()) {
    shape.push_back(size);
  } else if (depth >= shape.size() || shape[depth] != size) {
    throw std::runtime_error("is no array of numbers of one shape");
  }
  for (const auto& each : value) {
    flatten(each, depth + 1, shape, numbers);
  }
}

Json to_json(const at::Tensor& value) {
  if (value.dim() == 0) {
    return value.is_floating_point() ? Json(value.item<double>()) : Json(value.item<int64_t>());
  }
  Json list = Json::array();
  for (const auto& each : value.unbind()) {
    list.push_back(to_json(each));
  }
  return list;
}

// A tensor for a row of the manifest. A size that is a name is equal to all others of that name, within its range.
at::Tensor read_input(const Json& row, const Json& given, const Json& ranges, std::map<std::string, int64_t>& sizes) {
  const auto name = row.at("name").get<std::string>();
  if (!given.contains(name)) {
    throw std::runtime_error("the input " + name + " is missing");
  }
  std::vector<int64_t> shape;
  std::vector<double> numbers;
  try {
    flatten(given.at(name), 0, shape, numbers);
  } catch (const std::exception& error) {
    throw std::runtime_error("the input " + name + " " + error.what());
  }
  const auto& wanted = row.at("shape");
  bool fits = shape.size() == wanted.size();
  for (size_t dim = 0; fits && dim < shape.size(); ++dim) {
    if (wanted[dim].is_number()) {
      fits = shape[dim] == wanted[dim].get<int64_t>();
    } else {
      const auto symbol = wanted[dim].get<std::string>();
      fits = sizes.emplace(symbol, shape[dim]).first->second == shape[dim];
      if (ranges.contains(symbol)) {
        const auto& [least, most] = std::pair(ranges[symbol][0], ranges[symbol][1]);
        fits = fits && (least.is_null() || shape[dim] >= least) && (most.is_null() || shape[dim] <= most);
      }
    }
  }
  if (!fits) {
    throw std::runtime_error("the input " + name + " has the shape " + Json(shape).dump() + ", the program takes " + wanted.dump());
  }
  auto value = at::empty(shape, at::kDouble);
  std::copy(numbers.begin(), numbers.end(), value.data_ptr<double>());
  return value.to(serve::dtype_of(row.at("dtype").get<std::string>()));
}

Json answer(const Json& request, std::map<std::string, serve::Program>& programs, const at::Device& device) {
  std::vector<at::Tensor> inputs;
  serve::Program* program = nullptr;
  try {
    program = &programs.at(request.value("program", "model"));
    const Json given = request.value("inputs", Json::object());
    std::map<std::string, int64_t> sizes;
    for (const auto& row : program->manifest.at("inputs")) {
      inputs.push_back(read_input(row, given, program->manifest.at("calling").at("ranges"), sizes).to(device));
      if (row.contains("values") && inputs.back().numel() > 0) {
        const auto& range = row.at("values");
        const auto low = inputs.back().min().item<int64_t>(), high = inputs.back().max().item<int64_t>();
        if (low < range[0] || high > range[1]) {
          throw std::runtime_error(
              "the input " + row.at("name").get<std::string>() + " has the value " +
              std::to_string(low < range[0] ? low : high) + ", and may have those of " + range.dump());
        }
      }
    }
  } catch (const std::out_of_range&) {
    return {{"error", "there is no program '" + request.value("program", "model") + "'"}};
  } catch (const std::exception& error) {
    return {{"error", error.what()}};
  }
  const auto outputs = program->model->run(inputs);
  Json said = Json::object();
  size_t at = 0;
  for (const auto& row : program->manifest.at("outputs")) {
    const auto value = outputs.at(at++).cpu();
    said[row.at("name").get<std::string>()] = to_json(request.value("argmax", false) ? value.argmax(-1) : value);
  }
  return said;
}

void refuse_shards(const std::map<std::string, serve::Program>& programs) {
  for (const auto& [_, program] : programs) {
    for (const char* boundary : {"inputs", "outputs"}) {
      for (const auto& row : program.manifest.at(boundary)) {
        if (row.at("sharding").get<std::string>().find_first_of("SP") != std::string::npos) {
          throw std::runtime_error("'" + row.at("name").get<std::string>() + "' is sharded: convert with it at R");
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: torchrun --nproc-per-node N --no-python serve OUT\n";
    return 2;
  }
  try {
    const c10::InferenceMode no_gradients;
    const serve::Artifact artifact(argv[1]);
    serve::World world(artifact);
    auto programs = artifact.load(world.rank(), world.device());
    refuse_shards(programs);
    std::string line;
    while (world.next_line(line)) {
      Json said;
      try {
        said = answer(Json::parse(line), programs, world.device());
      } catch (const Json::exception& error) {
        said = {{"error", error.what()}};
      }
      if (world.rank() == 0) {
        std::cout << said.dump() << std::endl;
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
