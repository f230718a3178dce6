// amqplib on Node, promises as most services use it, and its callback API once. Speaks the lines of interop/client.py.
//
// Its folder is handed in by NODE_PATH: nothing is installed beside this file.
"use strict";

const assert = require("node:assert/strict");
const { once } = require("node:events");
const readline = require("node:readline");
const amqp = require("amqplib");
const callbacks = require("amqplib/callback_api");

const URL = process.env.AMQP_URL;
const WAIT_MS = 20000;
const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();

function inTime(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what} did not come`)), WAIT_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** The next `count` deliveries, not acknowledged. */
function take(channel, queue, count, options = {}) {
  const taken = [];
  let tag;
  const all = new Promise((resolve, reject) => {
    channel
      .consume(queue, (message) => {
        if (message === null) return reject(new Error("cancelled"));
        taken.push(message);
        if (taken.length === count) resolve(taken);
      }, options)
      .then((ok) => { tag = ok.consumerTag; }, reject);
  });
  return inTime(all, `${count} messages of ${queue}`).then(async (messages) => {
    await channel.cancel(tag);
    return messages;
  });
}

async function withConnection(use, suffix = "") {
  const connection = await amqp.connect(URL + suffix);
  try {
    return await use(connection);
  } finally {
    await connection.close();
  }
}

async function confirms(connection) {
  const channel = await connection.createConfirmChannel();
  await channel.assertQueue("node.confirms", { durable: true });
  for (let number = 0; number < 500; number++) {
    channel.sendToQueue("node.confirms", Buffer.from(String(number)), { persistent: true });
  }
  await inTime(channel.waitForConfirms(), "confirms");
  assert.equal((await channel.checkQueue("node.confirms")).messageCount, 500);
}

async function prefetch(connection) {
  const channel = await connection.createChannel();
  await channel.prefetch(10);
  const done = [];
  let held = 0;
  await inTime(new Promise((resolve, reject) => {
    channel.consume("node.confirms", (message) => {
      held += 1;
      if (held > 10) reject(new Error("more than the prefetch"));
      done.push(Number(message.content));
      if (held === 10) {
        channel.ack(message, true);
        held = 0;
      }
      if (done.length === 500) resolve();
    }).catch(reject);
  }), "500 messages");
  assert.deepEqual(done, [...Array(500).keys()]);
  await channel.close();
}

async function requeue(connection) {
  const channel = await connection.createChannel();
  const { queue } = await channel.assertQueue("", { exclusive: true });
  for (const body of ["1", "2"]) channel.sendToQueue(queue, Buffer.from(body));
  const [first, second] = await take(channel, queue, 2);
  channel.nack(first, false, true);
  channel.reject(second, false);
  const [again] = await take(channel, queue, 1);
  assert.equal(again.content.toString(), "1");
  assert.equal(again.fields.redelivered, true);
  channel.ack(again);
  assert.equal(await channel.get(queue), false);
}

async function topic(connection) {
  const channel = await connection.createChannel();
  await channel.assertExchange("node.topic", "topic", { durable: false, autoDelete: true });
  const { queue } = await channel.assertQueue("", { exclusive: true });
  await channel.bindQueue(queue, "node.topic", "*.critical");
  await channel.bindQueue(queue, "node.topic", "kern.#");
  for (const key of ["kern.critical", "auth.info", "auth.critical", "kern"]) {
    channel.publish("node.topic", key, Buffer.from(key));
  }
  const came = await take(channel, queue, 3, { noAck: true });
  assert.deepEqual(came.map((message) => message.content.toString()), ["kern.critical", "auth.critical", "kern"]);
}

async function returned(connection) {
  const channel = await connection.createConfirmChannel();
  const back = once(channel, "return");
  channel.publish("amq.direct", "node.nobody", Buffer.from("lost"), { mandatory: true, messageId: "m" });
  const [message] = await inTime(back, "the returned message");
  assert.equal(message.fields.replyCode, 312);
  assert.equal(message.properties.messageId, "m");
  assert.equal(message.content.toString(), "lost");
  await inTime(channel.waitForConfirms(), "its confirm");
}

async function deadLetter(connection) {
  const channel = await connection.createChannel();
  await channel.assertQueue("node.dead", { durable: false });
  await channel.assertQueue("node.mortal", {
    durable: false, messageTtl: 100, deadLetterExchange: "", deadLetterRoutingKey: "node.dead",
  });
  channel.sendToQueue("node.mortal", Buffer.from("late"));
  const [message] = await take(channel, "node.dead", 1, { noAck: true });
  const [death] = message.properties.headers["x-death"];
  assert.equal(death.queue, "node.mortal");
  assert.equal(death.reason, "expired");
  assert.equal(death.count, 1);
}

async function rpc(connection) {
  const serving = await connection.createChannel();
  await serving.assertQueue("node.rpc", { durable: false });
  await serving.consume("node.rpc", (asked) => {
    const answer = Buffer.from(String(2 * Number(asked.content)));
    serving.sendToQueue(asked.properties.replyTo, answer, { correlationId: asked.properties.correlationId });
    serving.ack(asked);
  });
  const asking = await connection.createChannel();
  const { queue: own } = await asking.assertQueue("", { exclusive: true });
  for (const replyTo of [own, "amq.rabbitmq.reply-to"]) {
    const answers = new Map();
    await inTime(new Promise((resolve, reject) => {
      asking.consume(replyTo, (answer) => {
        answers.set(answer.properties.correlationId, Number(answer.content));
        if (answers.size === 5) resolve();
      }, { noAck: true }).then(() => {
        for (let number = 0; number < 5; number++) {
          asking.sendToQueue("node.rpc", Buffer.from(String(number)), { correlationId: String(number), replyTo });
        }
      }, reject);
    }), "answers");
    for (let number = 0; number < 5; number++) assert.equal(answers.get(String(number)), 2 * number);
  }
}

async function headers(connection) {
  const told = {
    text: "šedá", yes: true, int: -5, long: 2 ** 40, float: 0.5, nothing: null,
    buffer: Buffer.from([0, 255]), list: [1, "two", { three: 3 }], table: { a: { b: {} } },
    stamp: { "!": "timestamp", value: 1767323045 }, decimal: { "!": "decimal", value: { digits: 314, places: 2 } },
  };
  const options = {
    headers: told, contentType: "text/plain", contentEncoding: "utf-8", priority: 3, correlationId: "c", replyTo: "r",
    expiration: "60000", messageId: "m", timestamp: 1767323045, type: "t", userId: "guest", appId: "a", persistent: true,
  };
  const channel = await connection.createChannel();
  const { queue } = await channel.assertQueue("", { exclusive: true });
  channel.sendToQueue(queue, Buffer.from("body"), options);
  const [message] = await take(channel, queue, 1, { noAck: true });
  const came = message.properties;
  assert.deepEqual({ ...came.headers }, told);
  for (const name of Object.keys(options)) {
    if (name !== "headers" && name !== "persistent") assert.equal(came[name], options[name], name);
  }
  assert.equal(came.deliveryMode, 2);
}

async function largeBody() {
  const body = Buffer.alloc(4 * 1024 * 1024, "0123456789abcdef");
  for (const suffix of ["", "?frameMax=8192"]) {
    await withConnection(async (connection) => {
      const channel = await connection.createConfirmChannel();
      const { queue } = await channel.assertQueue("", { exclusive: true });
      channel.sendToQueue(queue, body);
      await inTime(channel.waitForConfirms(), "its confirm");
      const message = await channel.get(queue, { noAck: true });
      assert.ok(body.equals(message.content));
    }, suffix);
  }
}

async function error(connection) {
  const channel = await connection.createChannel();
  const told = once(channel, "error");
  await assert.rejects(channel.checkQueue("node.nowhere"), /404/);
  assert.equal((await told)[0].code, 404);
  await (await connection.createChannel()).assertQueue("", { exclusive: true });
}

async function cancel(connection) {
  const channel = await connection.createChannel();
  await channel.assertQueue("node.cancel", { durable: false });
  const told = new Promise((resolve) => { channel.consume("node.cancel", resolve).then(() => channel.deleteQueue("node.cancel")); });
  assert.equal(await inTime(told, "the cancel"), null);
}

async function heartbeat() {
  await withConnection(async (connection) => {
    const channel = await connection.createChannel();
    await new Promise((resolve) => setTimeout(resolve, 3500));
    await channel.assertQueue("", { exclusive: true });
  }, "?heartbeat=1");
}

/** amqplib leaves reconnecting to the application; here, in its callback API. */
function reconnected() {
  return new Promise((resolve, reject) => {
    callbacks.connect(URL, (failed, connection) => {
      if (failed) return setTimeout(() => reconnected().then(resolve, reject), 100);
      connection.createChannel((problem, channel) => (problem ? reject(problem) : resolve([connection, channel])));
    });
  });
}

async function restart() {
  const connection = await amqp.connect(URL);
  const ended = new Promise((resolve) => {
    connection.on("error", () => {});
    connection.on("close", resolve);
  });
  const channel = await connection.createConfirmChannel();
  channel.on("error", () => {});
  await channel.assertQueue("node.kept", { durable: true });
  for (let number = 0; number < 50; number++) {
    channel.sendToQueue("node.kept", Buffer.from(String(number)), { persistent: true });
  }
  await inTime(channel.waitForConfirms(), "confirms");
  console.log("restart");
  assert.equal((await lines.next()).value, "restarted");
  await inTime(ended, "the end of the connection");
  const [again, other] = await inTime(reconnected(), "the new connection");
  const found = [];
  await inTime(new Promise((resolve) => {
    other.consume("node.kept", (message) => {
      found.push(Number(message.content));
      other.ack(message);
      if (found.length === 50) resolve();
    });
  }), "what was kept");
  assert.deepEqual(found, [...Array(50).keys()]);
  await new Promise((resolve) => again.close(resolve));
}

async function main() {
  const features = [
    ["confirms", confirms], ["prefetch", prefetch], ["requeue", requeue], ["topic", topic], ["return", returned],
    ["dead-letter", deadLetter], ["rpc", rpc], ["headers", headers], ["large-body", largeBody], ["error", error],
    ["cancel", cancel], ["heartbeat", heartbeat], ["restart", restart],
  ];
  for (const [name, show] of features) {
    // A restart ends every connection, so that one makes its own.
    await (show === restart ? restart() : withConnection(show));
    console.log(`shown ${name}`);
  }
  process.stdin.destroy();
}

main().catch((problem) => {
  console.error(problem);
  process.exit(1);
});
