// The operator AddOne of the tests, y = x + 1 for f32, as a library for CPU_EXTENSION_PATH.
#include <memory>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

namespace {

class AddOne : public ov::op::Op {
public:
    OPENVINO_OP("AddOne", "headrace");

    AddOne() = default;
    explicit AddOne(const ov::Output<ov::Node>& x) : Op({x}) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& given) const override {
        return std::make_shared<AddOne>(given.at(0));
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        outputs[0].set_shape(inputs[0].get_shape());
        const float* x = inputs[0].data<float>();
        float* y = outputs[0].data<float>();
        for (size_t index = 0; index < inputs[0].get_size(); ++index) {
            y[index] = x[index] + 1;
        }
        return true;
    }
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<AddOne>>()}));
