// A client in JavaScript, from the protos alone. Usage: PROTOS=DIR node client.js HOST:PORT
// DIR holds quire/v1/*.proto, and google/rpc/{status,error_details}.proto for the errors' details.
'use strict';

const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const definition = protoLoader.loadSync(
  ['quire/v1/inference.proto', 'google/rpc/status.proto', 'google/rpc/error_details.proto'],
  { includeDirs: [process.env.PROTOS], keepCase: true, defaults: true, oneofs: true, enums: String },
);
const { InferenceService } = grpc.loadPackageDefinition(definition).quire.v1;

const PROMPT = 'def add(a, b):\n    return';
const LONG = { text: PROMPT, sampling: { max_tokens: 900, ignore_eos: true } };

// Reads a completion as it is produced.
async function stream(client) {
  const request = { text: PROMPT, sampling: { temperature: 0, max_tokens: 16 }, stop: ['\n'] };
  let text = '';
  const tokenIds = [];
  for await (const response of client.Generate(request)) {
    if (response.event === 'delta') {
      text += response.delta.text;
      tokenIds.push(...response.delta.token_ids);
    } else if (response.event === 'finished') {
      console.log('stream.finish_reason', response.finished.finish_reason);
    } else if (response.event === 'usage') {
      const { prompt_tokens: prompt, completion_tokens: completion } = response.usage;
      console.log('stream.usage', prompt, completion);
    }
  }
  console.log('stream.text', text);
  console.log('stream.token_ids', ...tokenIds);
}

// The error that a call ends with; each of its events is shown to `onData`.
function failure(call, onData = () => {}) {
  return new Promise((resolve, reject) => {
    call.on('data', onData);
    call.on('error', resolve);
    call.on('end', () => reject(new Error('the call ended well')));
  });
}

// Ends a stream after its first event.
async function cancel(client) {
  const call = client.Generate(LONG);
  const error = await failure(call, () => call.cancel());
  console.log('cancel.code', error.code);
}

// Gives a call less time than it needs.
async function deadline(client) {
  const error = await failure(client.Generate(LONG, { deadline: Date.now() + 200 }));
  console.log('deadline.code', error.code);
}

// Reads from the details of an error which field was wrong.
async function badRequest(client) {
  const error = await failure(client.Generate({ text: PROMPT, sampling: { temperature: -1 } }));
  console.log('error.code', error.code);
  const [packed] = error.metadata.get('grpc-status-details-bin');
  for (const detail of definition['google.rpc.Status'].deserialize(packed).details) {
    if (detail.type_url.endsWith('/google.rpc.BadRequest')) {
      const bad = definition['google.rpc.BadRequest'].deserialize(detail.value);
      for (const violation of bad.field_violations) {
        console.log('error.violation', violation.field, violation.description);
      }
    }
  }
}

async function main() {
  const client = new InferenceService(process.argv[2], grpc.credentials.createInsecure());
  for (const example of [stream, cancel, deadline, badRequest]) {
    await example(client);
  }
  client.close();
}

main();
