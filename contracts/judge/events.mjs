// Reads Kafka records with the CloudEvents SDK for JavaScript: a JSON list of {key, headers, value} on standard input, the
// events on standard output in its order. Called by the tests, from the folder into which npm installed the SDK.
import { readFileSync } from 'node:fs';
import { Kafka } from 'cloudevents';

const records = JSON.parse(readFileSync(0, 'utf8'));
const events = records.map(({ key, headers, value }) => {
  const event = Kafka.toEvent({ key, headers, value: Buffer.from(value, 'utf8') });
  event.validate();
  return event.toJSON();
});
console.log(JSON.stringify(events));
