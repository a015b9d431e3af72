// The arguments that ops have in common, in the groups that schemas.cpp puts schemas together from. An op is written
// with groups as parameters; ungrouped<op> is the function of their fields, one by one, that the dispatcher calls.
#pragma once
#include <tuple>
#include <utility>

#include "tensors.h"

namespace mha::torch_layer {

struct BiasAndMask {
  OptionalTensor bias, mask, begin, end, query_ids, key_ids, blocks;
  std::optional<int64_t> left, right;
  bool top_left;
  int64_t block_size;
};

// Packed sequences: where they start in q and k, [B+1], and bounds of their lengths. Without starts, nothing.
struct Sequences {
  OptionalTensor q_starts, k_starts;
  int64_t max_q, max_k;
};

struct Scores {
  OptionalTensor sinks;
  double scale, softcap;
};

struct DropoutArguments {
  double dropout_p;
  OptionalTensor rng_state;
};

template <class... T>
struct Types {
  static constexpr size_t count = sizeof...(T);
};

// The types of a parameter's fields; a parameter that is no group is its own.
template <class Parameter>
struct FieldsOf {
  using types = Types<Parameter>;
};
template <>
struct FieldsOf<BiasAndMask> {
  using types = Types<OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
                      OptionalTensor, std::optional<int64_t>, std::optional<int64_t>, bool, int64_t>;
};
template <>
struct FieldsOf<Sequences> {
  using types = Types<OptionalTensor, OptionalTensor, int64_t, int64_t>;
};
template <>
struct FieldsOf<Scores> {
  using types = Types<OptionalTensor, double, double>;
};
template <>
struct FieldsOf<DropoutArguments> {
  using types = Types<double, OptionalTensor>;
};

template <class... Lists>
struct Joined;
template <class... T>
struct Joined<Types<T...>> {
  using types = Types<T...>;
};
template <class... A, class... B, class... Rest>
struct Joined<Types<A...>, Types<B...>, Rest...> : Joined<Types<A..., B...>, Rest...> {};

template <auto op, class Fields>
struct Ungrouped;
template <class Result, class... Parameters, Result (*op)(Parameters...), class... Fields>
struct Ungrouped<op, Types<Fields...>> {
  static Result call(Fields... fields) {
    std::tuple<Fields...> values(std::move(fields)...);
    return with_groups(values, std::index_sequence_for<Parameters...>());
  }

 private:
  // Where the fields of a parameter begin among all.
  static constexpr size_t first(size_t parameter) {
    const size_t counts[] = {FieldsOf<Parameters>::types::count...};
    size_t sum = 0;
    for (size_t i = 0; i < parameter; ++i) sum += counts[i];
    return sum;
  }
  template <size_t... parameter>
  static Result with_groups(std::tuple<Fields...>& values, std::index_sequence<parameter...>) {
    return op(
        group<Parameters, first(parameter)>(values, std::make_index_sequence<FieldsOf<Parameters>::types::count>())...);
  }
  template <class Parameter, size_t first, size_t... field>
  static Parameter group(std::tuple<Fields...>& values, std::index_sequence<field...>) {
    return Parameter{std::move(std::get<first + field>(values))...};
  }
};

template <auto op>
struct UngroupedOp;
template <class Result, class... Parameters, Result (*op)(Parameters...)>
struct UngroupedOp<op> : Ungrouped<op, typename Joined<typename FieldsOf<Parameters>::types...>::types> {};

template <auto op>
constexpr auto ungrouped = &UngroupedOp<op>::call;

}  // namespace mha::torch_layer
