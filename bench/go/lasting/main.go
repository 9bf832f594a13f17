// Command lasting runs three franz-go clients until its stdin ends: a member of a group, a reader
// without a group, and an idempotent writer. It prints what each does, as bench.lasting_clients.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const interval = 50 * time.Millisecond

var (
	bootstrap = flag.String("bootstrap", "", "HOST:PORT")
	group     = flag.String("group", "", "client id and group of the member of a group")
	alone     = flag.String("alone", "", "client id of the reader without a group")
	writer    = flag.String("writer", "", "client id of the writer")
	source    = flag.String("source", "", "topic that is read")
	sink      = flag.String("sink", "", "topic that is written")
	printing  sync.Mutex
)

func main() {
	flag.Parse()
	start := kgo.ConsumeStartOffset(kgo.NewOffset().AtStart())
	go read("group", client(*group, start, kgo.ConsumerGroup(*group), kgo.ConsumeTopics(*source)))
	go read("alone", client(*alone, start, kgo.ConsumeTopics(*source)))
	go write(client(*writer, kgo.DefaultProduceTopic(*sink)))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func client(clientID string, options ...kgo.Opt) *kgo.Client {
	logger := kgo.BasicLogger(os.Stderr, kgo.LogLevelInfo, nil)
	options = append(
		options, kgo.SeedBrokers(*bootstrap), kgo.ClientID(clientID), kgo.WithLogger(logger),
	)
	made, err := kgo.NewClient(options...)
	if err != nil {
		log.Fatal(err)
	}
	return made
}

func read(what string, client *kgo.Client) {
	for {
		fetches := client.PollFetches(context.Background())
		fetches.EachError(func(_ string, _ int32, err error) {
			log.Printf("%s: %v", what, err)
		})
		fetches.EachRecord(func(record *kgo.Record) {
			number, err := strconv.Atoi(string(record.Value))
			if err != nil {
				log.Fatal(err)
			}
			tell(what, number)
		})
	}
}

func write(client *kgo.Client) {
	for number := 0; ; number++ {
		record := kgo.StringRecord(strconv.Itoa(number))
		client.Produce(context.Background(), record, func(_ *kgo.Record, err error) {
			if err != nil {
				log.Printf("record %d: %v", number, err)
				tell("failed", number)
				return
			}
			tell("written", number)
		})
		time.Sleep(interval)
	}
}

func tell(what string, number int) {
	printing.Lock()
	defer printing.Unlock()
	fmt.Println(what, number)
}
