// MQTT.js against a running broker: by MQTT_URL, or with the argument `ws` by WS_URL. What it prints: interop/client.py.

"use strict";

const assert = require("node:assert");
const readline = require("node:readline");
const mqtt = require("mqtt");

const URL = process.argv[2] === "ws" ? process.env.WS_URL : process.env.MQTT_URL;
const ROOT = process.argv[2] === "ws" ? "mqttjs-ws" : "mqttjs";
const WAIT_MS = 30_000;
const LASTING_S = 600;
const answers = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const all = (count, make) => Array.from({ length: count }, (_, number) => make(number));

function inTime(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited in vain for ${what}`)), WAIT_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// One client; messages wait until they are taken.
class Peer {
  constructor(name, options) {
    this.client = mqtt.connect(URL, {
      protocolVersion: 5,
      clientId: name ? `${ROOT}-${name}` : undefined,
      reconnectPeriod: 100,
      ...options,
    });
    this.client.on("error", () => {}); // Reconnecting tells of each failure; what must hold is asserted.
    this.came = [];
    this.waiting = [];
    this.client.on("message", (topic, payload, packet) => {
      const message = { topic, text: payload.toString(), packet };
      const waiting = this.waiting.shift();
      if (waiting) waiting(message);
      else this.came.push(message);
    });
  }

  connected() {
    return inTime(new Promise((resolve) => this.client.once("connect", resolve)), "CONNACK");
  }

  async take(count) {
    const taken = [];
    while (taken.length < count) {
      const next = this.came.length ? this.came.shift() : new Promise((resolve) => this.waiting.push(resolve));
      taken.push(await inTime(Promise.resolve(next), "a message"));
    }
    return taken;
  }

  async texts(count) {
    return (await this.take(count)).map((message) => message.text);
  }
}

// Runs with these clients connected, and ends them.
async function using(settings, work) {
  const peers = settings.map(([name, options]) => new Peer(name, options));
  try {
    await Promise.all(peers.map((peer) => peer.connected()));
    return await work(...peers);
  } finally {
    await Promise.all(peers.map((peer) => peer.client.endAsync()));
  }
}

const lasting = { clean: false, properties: { sessionExpiryInterval: LASTING_S } };
const two = [[], []];

const atQos = (qos) => () =>
  using(two, async (reader, writer) => {
    const topic = `${ROOT}/qos/${qos}`;
    const [granted] = await reader.client.subscribeAsync(topic, { qos });
    assert.strictEqual(granted.qos, qos);
    const sent = all(100, String);
    await Promise.all(sent.map((text) => writer.client.publishAsync(topic, text, { qos })));
    const came = await reader.take(100);
    assert.deepStrictEqual(came.map((message) => message.text), sent);
    assert(came.every((message) => message.packet.qos === qos && !message.packet.retain));
  });

const wildcards = () =>
  using(two, async (reader, writer) => {
    await reader.client.subscribeAsync([`${ROOT}/w/+/temp`, `${ROOT}/w/all/#`], { qos: 1 });
    for (const rest of ["kitchen/temp", "kitchen/light", "all", "all/a/b"]) {
      await writer.client.publishAsync(`${ROOT}/w/${rest}`, rest, { qos: 1 });
    }
    assert.deepStrictEqual(await reader.texts(3), ["kitchen/temp", "all", "all/a/b"]);
  });

const retained = () =>
  using(two, async (reader, writer) => {
    await writer.client.publishAsync(`${ROOT}/kept/a`, "1", { qos: 1, retain: true });
    await reader.client.subscribeAsync(`${ROOT}/kept/#`, { qos: 1, rap: true });
    const [message] = await reader.take(1);
    assert.deepStrictEqual([message.text, message.packet.retain], ["1", true]);
    await writer.client.publishAsync(`${ROOT}/kept/a`, "", { qos: 1, retain: true });
    assert.deepStrictEqual(await reader.texts(1), [""]);
    await using([[]], async (late) => {
      await late.client.subscribeAsync(`${ROOT}/kept/#`, { qos: 1 });
      await writer.client.publishAsync(`${ROOT}/kept/b`, "end", { qos: 1 });
      assert.deepStrictEqual(await late.texts(1), ["end"]);
    });
  });

const will = () =>
  using([[]], async (reader) => {
    await reader.client.subscribeAsync(`${ROOT}/will`, { qos: 1 });
    const options = { reconnectPeriod: 0, will: { topic: `${ROOT}/will`, payload: Buffer.from("gone"), qos: 1 } };
    const mortal = new Peer("mortal", options);
    await mortal.connected();
    mortal.client.stream.destroy(); // no DISCONNECT
    assert.deepStrictEqual(await reader.texts(1), ["gone"]);
    await mortal.client.endAsync(true);
  });

async function restart() {
  console.log("restart");
  assert.strictEqual((await answers.next()).value, "restarted");
}

async function session() {
  const sent = all(10, String);
  await using([["sleeper", lasting]], (sleeper) => sleeper.client.subscribeAsync(`${ROOT}/session`, { qos: 2 }));
  await using([[]], async (writer) => {
    for (const text of sent) await writer.client.publishAsync(`${ROOT}/session`, text, { qos: 2 });
  });
  await restart();
  const sleeper = new Peer("sleeper", lasting);
  const connack = await sleeper.connected();
  assert.strictEqual(connack.sessionPresent, true);
  assert.deepStrictEqual(await sleeper.texts(10), sent);
  await sleeper.client.endAsync();
}

const shared = () =>
  using([[], [], []], async (one, other, writer) => {
    for (const member of [one, other]) {
      await member.client.subscribeAsync(`$share/workers/${ROOT}/jobs`, { qos: 1 });
    }
    for (const text of all(20, String)) await writer.client.publishAsync(`${ROOT}/jobs`, text, { qos: 1 });
    const came = [...(await one.texts(10)), ...(await other.texts(10))];
    assert.deepStrictEqual(came.map(Number).sort((a, b) => a - b), all(20, Number));
  });

const properties = () =>
  using(two, async (reader, writer) => {
    await reader.client.subscribeAsync(`${ROOT}/properties`, { qos: 1, properties: { subscriptionIdentifier: 9 } });
    const sent = {
      payloadFormatIndicator: true,
      contentType: "text/plain",
      responseTopic: "answers",
      correlationData: Buffer.from([0, 255]),
      userProperties: { a: ["1", "2"], b: "3" },
    };
    const told = { ...sent, messageExpiryInterval: 60 };
    await writer.client.publishAsync(`${ROOT}/properties`, "x", { qos: 1, properties: told });
    const [{ packet }] = await reader.take(1);
    const { messageExpiryInterval, subscriptionIdentifier, ...rest } = packet.properties;
    assert.deepStrictEqual({ ...rest, userProperties: { ...rest.userProperties } }, sent);
    assert.strictEqual(subscriptionIdentifier, 9);
    assert(messageExpiryInterval > 0 && messageExpiryInterval <= 60);
  });

// Both ways: the client numbers its own topics, and reads the broker's numbers.
const topicAlias = () =>
  using(
    [
      ["alias-reader", { properties: { topicAliasMaximum: 10 } }],
      ["alias-writer", { autoAssignTopicAlias: true }],
    ],
    async (reader, writer) => {
      await reader.client.subscribeAsync(`${ROOT}/alias/#`, { qos: 1 });
      for (const name of ["a", "b", "a", "b", "a"]) {
        await writer.client.publishAsync(`${ROOT}/alias/${name}`, name, { qos: 1 });
      }
      const came = await reader.take(5);
      assert.deepStrictEqual(came.map(({ topic }) => topic), ["a", "b", "a", "b", "a"].map((name) => `${ROOT}/alias/${name}`));
    },
  );

const largeBody = () =>
  using(two, async (reader, writer) => {
    const body = Buffer.alloc(4 * 1024 * 1024, "0123456789");
    await reader.client.subscribeAsync(`${ROOT}/large`, { qos: 1 });
    await writer.client.publishAsync(`${ROOT}/large`, body, { qos: 1 });
    const [{ packet }] = await reader.take(1);
    assert(packet.payload.equals(body));
  });

async function error() {
  const refused = mqtt.connect(URL, { protocolVersion: 5, username: "guest", password: "wrong", reconnectPeriod: 0 });
  const reason = await inTime(new Promise((resolve) => refused.once("error", resolve)), "a refusal");
  assert([134, 135].includes(reason.code), String(reason));
  await refused.endAsync(true);
}

// kill -9 with both connected: they come back by themselves, and what was published meanwhile comes once.
const reconnect = () =>
  using(
    [
      ["reader", lasting],
      ["writer", lasting],
    ],
    async (reader, writer) => {
      await reader.client.subscribeAsync(`${ROOT}/restart`, { qos: 2 });
      await writer.client.publishAsync(`${ROOT}/restart`, "before", { qos: 2 });
      assert.deepStrictEqual(await reader.texts(1), ["before"]);
      const closed = new Promise((resolve) => writer.client.once("close", resolve));
      const restarted = restart();
      await inTime(closed, "the end of the broker");
      const sent = all(10, String);
      const published = sent.map((text) => writer.client.publishAsync(`${ROOT}/restart`, text, { qos: 2 }));
      await restarted;
      await inTime(Promise.all(published), "acknowledgements");
      await writer.client.publishAsync(`${ROOT}/restart`, "end", { qos: 2 });
      assert.deepStrictEqual(await reader.texts(11), [...sent, "end"]);
    },
  );

async function main() {
  const features = {
    "qos-0": atQos(0),
    "qos-1": atQos(1),
    "qos-2": atQos(2),
    wildcards,
    retained,
    will,
    session,
    shared,
    properties,
    "topic-alias": topicAlias,
    "large-body": largeBody,
    error,
    restart: reconnect,
  };
  for (const [name, show] of Object.entries(features)) {
    await show();
    console.log(`shown ${name}`);
  }
}

main().then(
  () => process.exit(0),
  (problem) => {
    console.error(problem);
    process.exit(1);
  },
);
