// A virtual object that counts durably: one get and one set per call. `node service.mjs PORT`.
import * as http2 from "node:http2";
import * as restate from "@restatedev/restate-sdk";

// The SDK asks for a Node that has it.
Promise.withResolvers ??= () => {
  let resolve, reject;
  const promise = new Promise((one, other) => {
    resolve = one;
    reject = other;
  });
  return { promise, resolve, reject };
};

const notebook = restate.object({
  name: "notebook",
  handlers: {
    note: async (ctx, data) => {
      const count = ((await ctx.get("count")) ?? 0) + 1;
      ctx.set("count", count);
      return count;
    },
  },
});

http2
  .createServer(restate.createEndpointHandler({ services: [notebook] }))
  .listen(Number(process.argv[2]), "127.0.0.1");
