// Generate from Node.js, as any other service would call it: the .proto files of this repository and npm, no stubs.
//
//   npm ci
//   node generate.js 127.0.0.1:50050 "The capital of France is" --stream --max-tokens 16 --temperature 0.8 --seed 7
//
// Prints the text, then one line of JSON: ids, finish_reason, usage. 64-bit numbers are strings. A refused or failed call
// prints its status and the fields that are wrong to stderr, and ends with 1.

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const USAGE =
  'node generate.js TARGET "prompt" [--stream] [--chat] [--max-tokens N] [--temperature T] [--seed N] [--drafter NAME] ' +
  "[--stop TEXT]... [--seconds S]";
const ROOT = fileURLToPath(new URL("../../..", import.meta.url));
const MAX_MESSAGE_BYTES = 16 * 2 ** 20; // as the services have it; npm's default of 4 MiB is less
const UINT32_MAX = 2n ** 32n - 1n;
const UINT64_MAX = 2n ** 64n - 1n;

class UsageError extends Error {}

// ---- the command line ----------------------------------------------------------------------------------------------

function readCommandLine() {
  const text = { type: "string" };
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      stream: { type: "boolean", default: false },
      chat: { type: "boolean", default: false },
      "max-tokens": text,
      temperature: text,
      seed: text,
      drafter: text,
      stop: { type: "string", multiple: true },
      seconds: text,
    },
  });
  if (positionals.length !== 2) throw new UsageError(`expected TARGET and a prompt, got ${positionals.length} arguments`);
  const [target, prompt] = positionals;
  return { target, stream: values.stream, seconds: number(values, "seconds"), options: optionsOf(prompt, values) };
}

// A GenerationOptions. What is absent stays absent: the server knows the defaults.
function optionsOf(prompt, values) {
  const options = values.chat ? { chat: { messages: [{ role: "user", content: prompt }] } } : { prompt };
  const wanted = {
    max_tokens: integer(values, "max-tokens", UINT32_MAX),
    temperature: number(values, "temperature"),
    seed: integer(values, "seed", UINT64_MAX),
    drafter: values.drafter,
    stop: values.stop,
  };
  for (const [name, value] of Object.entries(wanted)) if (value !== undefined) options[name] = value;
  return options;
}

// As digits: a JavaScript number is exact only up to 2^53. protobufjs would turn what is no number into 0.
function integer(values, name, most) {
  const value = values[name];
  if (value === undefined) return undefined;
  if (!/^[0-9]+$/.test(value) || BigInt(value) > most) {
    throw new UsageError(`--${name}: expected an integer from 0 to ${most}, got "${value}"`);
  }
  return most > UINT32_MAX ? value : Number(value);
}

function number(values, name) {
  const value = values[name];
  if (value === undefined) return undefined;
  if (value.trim() === "" || !Number.isFinite(Number(value))) {
    throw new UsageError(`--${name}: expected a number, got "${value}"`);
  }
  return Number(value);
}

// ---- the calls -----------------------------------------------------------------------------------------------------

function connect(target) {
  const definition = protoLoader.loadSync("protos/v1/generation.proto", {
    includeDirs: [ROOT],
    keepCase: true, // names as in the .proto files
    longs: String,
    enums: String,
    defaults: true,
  });
  const { GenerationService } = grpc.loadPackageDefinition(definition).eagle_pangu.v1;
  return new GenerationService(target, grpc.credentials.createInsecure(), {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.enable_http_proxy": 0,
  });
}

const callOptions = (seconds) => (seconds === undefined ? {} : { deadline: Date.now() + 1000 * seconds });

// The whole answer; rejects with grpc's error.
function generate(client, options, seconds) {
  return new Promise((resolve, reject) => {
    client.Generate({ options }, callOptions(seconds), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// The same answer as deltas, one a round. Leave the loop to cancel the call.
async function* generateStream(client, options, seconds) {
  const call = client.GenerateStream({ options }, callOptions(seconds));
  try {
    yield* call;
  } finally {
    call.cancel(); // no effect on a call that is over
  }
}

// Writes text as it comes; returns the fields of the whole answer.
async function show(deltas) {
  const answer = { token_ids: [] };
  for await (const delta of deltas) {
    process.stdout.write(delta.text);
    answer.token_ids.push(...delta.token_ids);
    if (delta.usage) Object.assign(answer, { ...delta, token_ids: answer.token_ids });
  }
  return answer;
}

// ---- errors --------------------------------------------------------------------------------------------------------

// The few fields of google/rpc/status.proto and error_details.proto that are read here.
const rpc = protobuf.parse(
  `
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { repeated Any details = 3; }
  message FieldViolation { string field = 1; string description = 2; }
  message BadRequest { repeated FieldViolation field_violations = 1; }
`,
  { keepCase: true },
).root;

// What a refused request got wrong, each as { field, description }.
function violationsOf(error) {
  return error.metadata
    .get("grpc-status-details-bin")
    .flatMap((bytes) => rpc.lookupType("Status").decode(bytes).details)
    .filter((detail) => detail.type_url.endsWith("/google.rpc.BadRequest"))
    .flatMap((detail) => rpc.lookupType("BadRequest").decode(detail.value).field_violations);
}

function explain(error) {
  if (error instanceof UsageError || error.code?.startsWith?.("ERR_PARSE_ARGS")) return [error.message, USAGE];
  if (!(error.metadata instanceof grpc.Metadata)) return [error.stack];
  const lines = violationsOf(error).map(({ field, description }) => `  ${field}: ${description}`);
  return [`${grpc.status[error.code]}: ${error.details}`, ...lines];
}

// ---- all of it -----------------------------------------------------------------------------------------------------

async function main() {
  const { target, stream, seconds, options } = readCommandLine();
  const client = connect(target);
  try {
    const answer = stream
      ? await show(generateStream(client, options, seconds))
      : await show([await generate(client, options, seconds)]);
    const { token_ids, finish_reason, matched_stop, seed, usage } = answer;
    process.stdout.write(`\n${JSON.stringify({ token_ids, finish_reason, matched_stop, seed, usage })}\n`);
  } finally {
    client.close();
  }
}

main().catch((error) => {
  console.error(explain(error).join("\n"));
  process.exitCode = 1;
});
