// A client in Go, from the protos alone. Usage: client HOST:PORT
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	quirepb "quire/v1"
)

const prompt = "def add(a, b):\n    return"

func request(sampling *quirepb.SamplingParams, stop ...string) *quirepb.GenerateRequest {
	return &quirepb.GenerateRequest{
		Prompt:   &quirepb.GenerateRequest_Text{Text: prompt},
		Sampling: sampling,
		Stop:     stop,
	}
}

var long = request(&quirepb.SamplingParams{MaxTokens: proto.Int32(900), IgnoreEos: true})

// stream reads a completion as it is produced.
func stream(client quirepb.InferenceServiceClient) {
	sampling := &quirepb.SamplingParams{Temperature: proto.Float32(0), MaxTokens: proto.Int32(16)}
	call, err := client.Generate(context.Background(), request(sampling, "\n"))
	if err != nil {
		log.Fatal(err)
	}
	var text strings.Builder
	var tokenIds []string
	for {
		response, err := call.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		switch event := response.Event.(type) {
		case *quirepb.GenerateResponse_Delta:
			text.WriteString(event.Delta.Text)
			for _, id := range event.Delta.TokenIds {
				tokenIds = append(tokenIds, fmt.Sprint(id))
			}
		case *quirepb.GenerateResponse_Finished:
			fmt.Println("stream.finish_reason", event.Finished.FinishReason)
		case *quirepb.GenerateResponse_Usage:
			fmt.Println("stream.usage", event.Usage.PromptTokens, event.Usage.CompletionTokens)
		}
	}
	fmt.Println("stream.text", text.String())
	fmt.Println("stream.token_ids", strings.Join(tokenIds, " "))
}

// failure reads a call to its end, which is an error; each event is shown to onEvent.
func failure(call quirepb.InferenceService_GenerateClient, err error, onEvent func()) *status.Status {
	for err == nil {
		if _, err = call.Recv(); err == nil {
			onEvent()
		}
	}
	return status.Convert(err)
}

// cancel ends a stream after its first event.
func cancel(client quirepb.InferenceServiceClient) {
	ctx, cancel := context.WithCancel(context.Background())
	call, err := client.Generate(ctx, long)
	fmt.Println("cancel.code", int(failure(call, err, cancel).Code()))
}

// deadline gives a call less time than it needs.
func deadline(client quirepb.InferenceServiceClient) {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	call, err := client.Generate(ctx, long)
	fmt.Println("deadline.code", int(failure(call, err, func() {}).Code()))
}

// badRequest reads from the details of an error which field was wrong.
func badRequest(client quirepb.InferenceServiceClient) {
	sampling := &quirepb.SamplingParams{Temperature: proto.Float32(-1)}
	call, err := client.Generate(context.Background(), request(sampling))
	failed := failure(call, err, func() {})
	fmt.Println("error.code", int(failed.Code()))
	for _, detail := range failed.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.FieldViolations {
				fmt.Println("error.violation", violation.Field, violation.Description)
			}
		}
	}
}

func main() {
	// From gRPC 1.63 on: grpc.NewClient, with insecure.NewCredentials().
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := quirepb.NewInferenceServiceClient(connection)
	stream(client)
	cancel(client)
	deadline(client)
	badRequest(client)
}
