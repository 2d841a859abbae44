// Runs models in onnxruntime-web's wasm provider under node, one thread, and prints the bits of their results as JSON.
// node consumer_web.mjs FOLDER LIST: FOLDER has node_modules/onnxruntime-web; LIST holds [path, type, shape, values].
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
const [folder, list] = process.argv.slice(2);
const require = createRequire(folder + "/");
const ort = await import(pathToFileURL(require.resolve("onnxruntime-web")).href);
const api = ort.default ?? ort;
api.env.wasm.numThreads = 1;
api.env.logLevel = "error";
const out = [];
for (const [path, type, dims, values] of JSON.parse(readFileSync(list, "utf8"))) {
  try {
    const session = await api.InferenceSession.create(readFileSync(path), { executionProviders: ["wasm"] });
    const data = type === "float16" ? Uint16Array.from(values) : Float32Array.from(values);
    const result = await session.run({ [session.inputNames[0]]: new api.Tensor(type, data, dims) });
    const y = result[session.outputNames[0]];
    const bits = new Uint8Array(y.data.buffer, y.data.byteOffset, y.data.byteLength);
    out.push({ type: y.type, dims: y.dims, hex: Buffer.from(bits).toString("hex") });
  } catch (error) {
    out.push({ error: String(error.message ?? error) });
  }
}
console.log(JSON.stringify(out));
