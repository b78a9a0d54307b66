// A model of an AOTInductor package, for Python.
//
// torch lets go of the GIL while a method of such a class runs. That is what it is for: a thread of gloo takes the GIL
// to free a tensor, and whoever holds the GIL and waits for that thread waits for ever.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

namespace {

class Model : public torch::CustomClassHolder {
 public:
  Model(const std::string& file, const std::string& name, int64_t device)
      : loader_(file, name, /*run_single_threaded=*/true, /*num_runners=*/1, static_cast<c10::DeviceIndex>(device)) {}

  std::vector<std::string> constants() {
    return loader_.get_constant_fqns();
  }

  // The tensors are used where they are, and written to.
  void load(const c10::Dict<std::string, at::Tensor>& values) {
    std::unordered_map<std::string, at::Tensor> map;
    for (const auto& entry : values) {
      map.emplace(entry.key(), entry.value());
    }
    loader_.load_constants(map, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    return loader_.boxed_run(std::move(inputs));
  }

 private:
  torch::inductor::AOTIModelPackageLoader loader_;
};

TORCH_LIBRARY(tpcompiler, library) {
  library.class_<Model>("Model")
      .def(torch::init<const std::string&, const std::string&, int64_t>())
      .def("constants", [](const c10::intrusive_ptr<Model>& model) { return model->constants(); })
      .def("load", [](const c10::intrusive_ptr<Model>& model, c10::Dict<std::string, at::Tensor> values) { model->load(values); })
      .def("run", [](const c10::intrusive_ptr<Model>& model, std::vector<at::Tensor> inputs) { return model->run(std::move(inputs)); });
}

} // namespace
