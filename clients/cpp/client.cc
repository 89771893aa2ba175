// A client in C++, from the protos alone. Usage: client HOST:PORT
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "quire/v1/inference.grpc.pb.h"

using quire::v1::GenerateRequest;
using quire::v1::GenerateResponse;
using quire::v1::InferenceService;

GenerateRequest make_request() {
  GenerateRequest request;
  request.set_text("def add(a, b):\n    return");
  return request;
}

GenerateRequest make_long_request() {
  GenerateRequest request = make_request();
  request.mutable_sampling()->set_max_tokens(900);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// Reads a call to its end, showing each event to `on_event`; gives what it ends with.
grpc::Status read(InferenceService::Stub& stub, grpc::ClientContext& context,
                  const GenerateRequest& request,
                  const std::function<void(const GenerateResponse&)>& on_event) {
  std::unique_ptr<grpc::ClientReader<GenerateResponse>> call = stub.Generate(&context, request);
  GenerateResponse response;
  while (call->Read(&response)) on_event(response);
  return call->Finish();
}

// Reads a completion as it is produced.
void stream(InferenceService::Stub& stub) {
  GenerateRequest request = make_request();
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(16);
  request.add_stop("\n");
  std::string text, token_ids;
  grpc::ClientContext context;
  grpc::Status status = read(stub, context, request, [&](const GenerateResponse& response) {
    if (response.has_delta()) {
      text += response.delta().text();
      for (uint32_t id : response.delta().token_ids()) token_ids += " " + std::to_string(id);
    } else if (response.has_finished()) {
      std::cout << "stream.finish_reason "
                << quire::v1::FinishReason_Name(response.finished().finish_reason()) << "\n";
    } else if (response.has_usage()) {
      std::cout << "stream.usage " << response.usage().prompt_tokens() << " "
                << response.usage().completion_tokens() << "\n";
    }
  });
  if (!status.ok()) std::cerr << "stream: " << status.error_message() << "\n";
  std::cout << "stream.text " << text << "\nstream.token_ids" << token_ids << "\n";
}

// Ends a stream after its first event.
void cancel(InferenceService::Stub& stub) {
  grpc::ClientContext context;
  grpc::Status status = read(stub, context, make_long_request(),
                             [&](const GenerateResponse&) { context.TryCancel(); });
  std::cout << "cancel.code " << status.error_code() << "\n";
}

// Gives a call less time than it needs.
void deadline(InferenceService::Stub& stub) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  grpc::Status status = read(stub, context, make_long_request(), [](const GenerateResponse&) {});
  std::cout << "deadline.code " << status.error_code() << "\n";
}

// Reads from the details of an error which field was wrong.
void bad_request(InferenceService::Stub& stub) {
  GenerateRequest request = make_request();
  request.mutable_sampling()->set_temperature(-1);
  grpc::ClientContext context;
  grpc::Status status = read(stub, context, request, [](const GenerateResponse&) {});
  std::cout << "error.code " << status.error_code() << "\n";
  google::rpc::Status packed;
  packed.ParseFromString(status.error_details());
  for (const google::protobuf::Any& detail : packed.details()) {
    google::rpc::BadRequest bad;
    if (!detail.UnpackTo(&bad)) continue;
    for (const auto& violation : bad.field_violations()) {
      std::cout << "error.violation " << violation.field() << " " << violation.description()
                << "\n";
    }
  }
}

int main(int, char** argv) {
  std::unique_ptr<InferenceService::Stub> stub = InferenceService::NewStub(
      grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  stream(*stub);
  cancel(*stub);
  deadline(*stub);
  bad_request(*stub);
}
